"""What goes into a decision, and what comes out of it.

These are msgspec Structs, because they cost a tenth of frozen dataclasses to make.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from ..config import Mode, Uncovered
from ..decision_table.score import Verdict
from ..decision_table.table import ScoredTable
from ..fleet.residency import Residency
from ..fleet.view import WorkerView
from ..fleet.worker import WorkerId


class Route(StrEnum):
    LOCAL = "LOCAL"  # append-prefill on the decode worker that holds the prefix
    SPLIT = "SPLIT"  # prefill worker, KV transfer, decode worker
    REPLICA = "REPLICA"  # one replica does both


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy may know of one request. Token counts are estimates unless a tokenizer is configured."""

    model: str
    session_id: str
    number: int  # 1-based
    prompt_tokens: int
    held_tokens: int  # prompt tokens that an earlier turn of this session covers
    output_tokens: int  # expected length of the answer
    decode: Residency | None = None  # the D or R that computed the session's last turn
    prefill: Residency | None = None  # the P that last prefilled for it
    affinity: WorkerId | None = None  # the D or R to prefer where none holds anything
    single_engine: str | None = None  # why one engine must do it all, e.g. "n"
    stored_response: bool = False  # the history is stored in the engine that answered last
    forced: Route | None = None  # what the operator asks for on this request, whatever mode and table say

    @property
    def new_tokens(self) -> int:
        return max(1, self.prompt_tokens - self.held_tokens)


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's settings: mode, the table with weights applied, limits."""

    mode: Mode
    scored: ScoredTable | None = None
    uncovered: Uncovered = Uncovered.LOCAL
    x: float = 0.5
    worker_limit: int = 0  # legs that one worker takes at once; 0: any number
    warm_up_s: float = 0.0  # over which a new worker's share of traffic grows


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The route, its workers, and why. `decode` is the D, or the R of a REPLICA turn."""

    route: Route
    reason: str
    decode: WorkerView
    prefill: WorkerView | None = None
    wanted: Route  # the route asked for by force, mode or table, before any veto
    vetoes: tuple[str, ...] = ()
    verdict: Verdict | None = None
    qps: float = 0.0
    cached_tokens: int = 0  # prompt tokens that `decode` is believed to hold already
