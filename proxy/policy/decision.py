"""What goes into a decision, and what comes out of it.

These are msgspec Structs, because they cost a tenth of frozen dataclasses to make. Those without `gc` hold nothing that
could lead back to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from ..beliefs.held import Held
from ..config import Mode, StageOrder, Uncovered
from ..decision_table.score import Verdict, WeightRules, Weights
from ..decision_table.table import ScoredTable
from ..fleet.ledger import LegEstimates
from ..fleet.view import WorkerView
from ..fleet.worker import Role, WorkerId
from ..laws.prediction import NO_PREDICTION, Laws, Prediction
from ..laws.targets import USUAL, SloTargets, TargetRules
from ..openai.request import Endpoint
from .profiles.prompt_blocks import NO_BLOCKS, PromptBlocks
from .profiles.schedule import Schedule
from .returns import Returns
from .stage_order import OrderRules


class Route(StrEnum):
    LOCAL = "LOCAL"  # append-prefill on the decode worker that holds the prefix
    SPLIT = "SPLIT"  # prefill worker, KV transfer, decode worker
    REPLICA = "REPLICA"  # one replica does both
    READBACK = "READBACK"  # a SPLIT whose P first reads the session's KV from that decode worker


NO_HANDLE = "no_handle"  # veto of a READBACK
_PREFILL, _READBACK, _RESPONSES = Role.PREFILL, Route.READBACK, Endpoint.RESPONSES  # by name they are slow to look up


class Readable(msgspec.Struct, frozen=True, gc=False):
    """Of a session's D, what a P may read back."""

    decode: WorkerId
    tokens: int  # of the prompt, from its start


class Turn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the policy may know of one request. Token counts are estimates unless a tokenizer is configured."""

    model: str
    session_id: str
    number: int  # 1-based
    prompt_tokens: int
    held_tokens: int  # prompt tokens that an earlier turn of this session covers: the most that is held of it
    output_tokens: int  # expected length of the answer
    held: Mapping[WorkerId, Held] = {}  # of the prompt, by each P, D and R that holds any of it
    decode: WorkerId | None = None  # the D or R of the session's last turn, which stores its responses
    affinity: WorkerId | None = None  # the D or R to prefer where none holds anything
    lost: str | None = None  # why `decode` holds nothing of it: `decode_restarted` or `evicted`
    single_engine: str | None = None  # why one engine must do it all, e.g. "n"
    endpoint: Endpoint = Endpoint.CHAT  # not every connector can split turns of each
    stored_response: bool = False  # the history is stored in the engine that answered last
    forced: Route | None = None  # what the operator asks for on this request, whatever mode and table say
    slo: SloTargets = USUAL
    blocks: PromptBlocks = NO_BLOCKS  # of the prompt, where an index of what was sent is kept
    readable: Readable | None = None
    unreadable: str = NO_HANDLE  # why nothing can be read back, where `readable` is None
    weights: Weights | None = None  # of predicted values, its key's or its model's; None: the rules'

    @property
    def is_response(self) -> bool:
        return self.endpoint is _RESPONSES

    @property
    def new_tokens(self) -> int:
        new = self.prompt_tokens - self.held_tokens
        return new if new > 1 else 1

    def held_by(self, view: WorkerView) -> int:
        """Tokens of the prompt."""
        held = self.held.get(view.worker.address)  # type: ignore[call-overload]  # as `view.id`, without its call
        if held is None:
            return 0
        return held.tokens if held.tokens < self.prompt_tokens else self.prompt_tokens


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of the modes that go by limits; see the config's keys of the same names."""

    local_tokens: int = 2048
    local_share: float = 0.7
    prefill_busy_tokens: int = 8192
    prefill_busy_requests: int = 2
    decode_busy_requests: int = 0


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's settings: mode, the table with weights applied, limits."""

    mode: Mode
    scored: ScoredTable | None = None
    uncovered: Uncovered = Uncovered.LOCAL
    x: float = 0.5
    limits: Limits = Limits()
    laws: Laws | None = None  # of the engines; the modes that predict need them
    schedule: Schedule | None = None  # for mode `profiles`
    returns: Returns | None = None  # of sessions to their workers; None: nothing is known of them
    weights: Weights = Weights(1.0, 1.0)
    moves_kv: bool = False  # whether a D or R may lend itself as P, and an R pull KV
    prefills_answer: bool = False  # whether a P may answer a turn alone, as an R does
    fetches_kv: bool = False  # whether who computes a prompt may first fetch KV from any other one; simulated ones can
    explore_share: float = 0.0  # of turns in mode `slo`, that may go where it is not best
    worker_limit: int = 0  # legs that one worker takes at once; 0: any number
    warm_up_s: float = 0.0  # over which a new worker's share of traffic grows
    orders: OrderRules = OrderRules()  # in which the workers of a SPLIT are chosen
    targets: TargetRules = TargetRules()  # from which routing makes `Turn.slo`
    weighing: WeightRules = WeightRules()  # and `Turn.weights`


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One way to serve the turn, judged by the laws; or why it was not judged."""

    route: Route
    decode: WorkerView  # or the R
    prefill: WorkerView | None = None
    source: WorkerView | None = None  # whose KV is moved to the worker that computes the prompt, before it does
    fetched_tokens: int = 0  # of the prompt, by that
    prediction: Prediction | None = None
    score: float = math.inf  # in the objective's unit; the least is best
    terms: Mapping[str, float] = {}  # that add up to the score
    excluded: str = ""  # the rule that forbids it


class Preference(msgspec.Struct, frozen=True, gc=False):
    """The route that is wanted: by force or by the mode."""

    route: Route
    reason: str
    verdict: Verdict | None = None
    ways: Sequence[Candidate] = ()  # the best first, of which that is taken; empty: the route alone is wanted
    patience_s: float = math.inf  # see `Decision`
    decode: WorkerView | None = None  # where LOCAL is wanted whatever is held there; None: where the session lives


class Decision(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The route, its workers, and why. `decode` is the D, or the R of a REPLICA turn."""

    route: Route
    reason: str
    decode: WorkerView
    prefill: WorkerView | None = None
    order: StageOrder = StageOrder.MODE  # in force for its model, also where the turn came to need no P
    wanted: Route  # the route asked for by force, mode or table, before any veto
    vetoes: tuple[str, ...] = ()
    verdict: Verdict | None = None
    qps: float = 0.0
    held: Held | None = None  # what `decode` is believed to hold of the prompt
    source: WorkerView | None = None  # as of a `Candidate`
    fetched_tokens: int = 0
    prediction: Prediction | None = None  # None: the engine has no profile
    candidates: Sequence[Candidate] = ()  # the best first, where the mode judges several
    patience_s: float = math.inf  # that the first token could be later than on an idle engine, within its target

    @property
    def cached_tokens(self) -> int:
        return 0 if self.held is None else self.held.tokens

    @property
    def lender(self) -> WorkerView | None:
        """The D or R that lends itself as P."""
        return None if self.prefill is None or self.prefill.worker.role is _PREFILL else self.prefill

    def estimates(self, turn: Turn, *, shows_first_token: bool = True) -> LegEstimates:
        """What its legs will take of its workers."""
        prediction, prompt_tokens = self.prediction or NO_PREDICTION, turn.prompt_tokens
        new, new_on_prefill, is_lent = prompt_tokens - self.cached_tokens, 0, False
        if (prefill := self.prefill) is not None:
            # Who reads back does so under another name than what it holds.
            new_on_prefill = prompt_tokens - (0 if self.route is _READBACK else turn.held_by(prefill))
            is_lent = prefill.worker.role is not _PREFILL
        return LegEstimates(
            prompt_tokens=prompt_tokens,
            new_tokens=new if new > 1 else 1,
            output_tokens=turn.output_tokens,
            new_on_prefill_tokens=new_on_prefill,
            fetched_tokens=self.fetched_tokens,
            is_lent=is_lent,
            prefill_s=prediction.prefill_s,
            beside_s=prediction.beside_s,
            fetch_link_s=prediction.fetch_link_s,
            link_s=prediction.link_s,
            ready_s=prediction.ready_s,
            patience_s=self.patience_s,
            shows_first_token=shows_first_token,
        )
