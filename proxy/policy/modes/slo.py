"""The fewest turns that miss their targets: this one, and those that it would delay.

Of others it is not known what they were promised, so they have the usual targets. A turn that may be slow must not
make them slow, and one that cannot be fast enough anywhere must not either.
"""

from __future__ import annotations

from hashlib import sha256

import msgspec
from msgspec.structs import replace

from ...fleet.worker import Role
from ...laws.prediction import Outlook, Work
from ...laws.targets import miss
from ..candidates import Candidates
from ..decision import Preference, Rules, Turn
from ..returns import Recomputed, Returns
from ..ways import Terms, Way, best_way

TPOT_SPREAD = 0.15
"""Of the logarithm of predictions' errors, wider than most are: streams count before they are at their limit, so load
spreads over workers in time."""
STREAM_LENGTHS = (0.73, 1.68, 3.23)
"""Of answers that run, over the usual one: if lengths are exponential, those follow a gamma distribution of shape 2, as
long ones are there for longer. The middles of its thirds."""
RECENT_WEIGHT = 0.3  # of prompts that came lately, where it is known which sessions are likely to return
EVICTED_WEIGHT = 0.5  # as what is evicted now might have been soon in any case
GROWTH = 2  # of a session that begins: so many times its first prompt is still to come
EXPLORED = "explored"  # reason of a way that is not the best
EXPLORED_COST = 0.05  # expected misses, at most
_PREFILL = Role.PREFILL  # looking up enum members by name is slow
WORK_WEIGHT = 0.02  # of what is close in all else, the way that takes less of the fleet
MOVE_WEIGHT = 0.005


def slo(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    preference = best_way(turn, candidates, rules, ExpectedMisses(turn, rules).terms)
    if rules.explore_share and _draw(turn) < rules.explore_share:
        return _explored(preference)
    return preference


def _draw(turn: Turn) -> float:
    """At random below 1, and the same for a turn whenever it is decided."""
    return int.from_bytes(sha256(f"{turn.session_id} {turn.number}".encode()).digest()[:8]) / 2**64


def _explored(preference: Preference) -> Preference:
    """The best way over another worker that answers, where it is nearly as good."""
    ways = preference.ways
    other = next((way for way in ways if way.decode is not ways[0].decode), None)
    if other is None or other.score > ways[0].score + EXPLORED_COST:
        return preference
    rest = [way for way in ways if way is not other]
    return replace(preference, route=other.route, reason=EXPLORED, ways=[other, *rest])


class ExpectedMisses:
    """The score of each way to serve one turn. What several have in common is worked out once."""

    def __init__(self, turn: Turn, rules: Rules) -> None:
        self._turn, self._rules, self._usual, self._returns = turn, rules, rules.targets.usual, rules.returns
        self._slowed: dict[Outlook, Slowed] = {}  # by where the turn would decode
        self._delayed: dict[Work, Delayed] = {}
        self._lost: dict[Outlook, float] = {}  # by the worker that answers: turns whose KV is evicted there
        self._lost_on_prefill: dict[Work, float] = {}

    def terms(self, way: Way) -> Terms:
        work, decode, prediction, returns = way.work, way.decode, way.prediction, self._returns
        slowed = self._slowed.get(decode) or self._slowed_on(decode)
        delayed = self._delayed.get(work) or self._delayed_by(work)
        usual_s, ttft_s = delayed.usual_limit_s, prediction.ttft_s
        return {
            "ttft": miss(ttft_s, delayed.limit_s, delayed.spread),
            "tpot": slowed.own,
            "streams": delayed.streams,
            "batch": slowed.others,
            "queue": delayed.queue,
            "evicted": 0.0 if returns is None else EVICTED_WEIGHT * self._evicted(way, returns),
            "work": WORK_WEIGHT * (ttft_s / usual_s + prediction.tpot_s / self._usual.tpot_s),
            "moved": MOVE_WEIGHT * prediction.transfer_s / usual_s,
        }

    def _evicted(self, way: Way, returns: Returns) -> float:
        """Turns that are likely to come back, find their KV evicted for this one's, and be late for that."""
        turn, decode, prefill, work = self._turn, way.decode, way.prefill, way.work
        prompt, lost = turn.prompt_tokens, self._lost.get(decode)
        if lost is None:
            written = prompt - turn.held_by(decode.view) + turn.output_tokens
            if not turn.held_tokens:
                written += GROWTH * prompt
            lost = self._lost[decode] = self._lost_at(decode, written, returns)
        if prefill is None:
            return lost
        on_prefill = self._lost_on_prefill.get(work)
        if on_prefill is None:
            on_prefill = self._lost_on_prefill[work] = self._lost_at(prefill, prompt - way.held(turn), returns)
        return lost + on_prefill

    def _lost_at(self, at: Outlook, written: int, returns: Returns) -> float:
        recomputed = Recomputed(at.laws.costs, self._usual)
        return returns.lost(at.view.id, self._turn.model, written, at.now_s, recomputed)

    def _slowed_on(self, at: Outlook) -> Slowed:
        slowed = self._slowed[at] = Slowed.of(at, self._turn.slo.tpot_s, self._usual.tpot_s)
        return slowed

    def _delayed_by(self, work: Work) -> Delayed:
        at, turn, others, missing = work.at, self._turn, self._usual, 0.0
        if at.sequences:
            missing = (self._slowed.get(at) or self._slowed_on(at)).usual
        idle_s = at.idle.ttft_s
        limit_s = turn.slo.ttft_limit_s(idle_s)
        delayed = self._delayed[work] = Delayed(
            limit_s,
            limit_s if turn.slo is others else others.ttft_limit_s(idle_s),
            at.laws.ttft_spread,
            _stalled(work, turn, others.tpot_s, missing),
            _queued(work, turn, others.ttft_s, self._rules),
        )
        return delayed


class Slowed(msgspec.Struct, frozen=True, gc=False):
    """Expected misses of the TPOT target as a turn decodes on a worker, whichever way it comes there."""

    own: float
    others: float  # more than without it
    usual: float  # of each of the others without it

    @classmethod
    def of(cls, at: Outlook, target_s: float, others_s: float) -> Slowed:
        """others_s: the target of those that decode there."""
        own = miss(at.tpot_s, target_s, TPOT_SPREAD)
        if not at.sequences:
            return cls(own, 0.0, 0.0)
        usual = miss(at.usual_tpot_s, others_s, TPOT_SPREAD)
        theirs = own if target_s == others_s else miss(at.tpot_s, others_s, TPOT_SPREAD)
        return cls(own, at.sequences * (theirs - usual) if theirs > usual else 0.0, usual)


class Delayed(msgspec.Struct, frozen=True, gc=False):
    """Of a prompt that is computed on one worker, whichever one answers: its limit, and what it makes others miss."""

    limit_s: float
    usual_limit_s: float  # of such a prompt by the usual targets
    spread: float  # of its TTFT, see `miss`
    streams: float
    queue: float


def _stalled(work: Work, turn: Turn, target_s: float, usual_misses: float) -> float:
    """Streams that miss their TPOT as a prompt delays them once: the shorter an answer, the more by each delay."""
    at, beside_s = work.at, work.beside_s
    if not at.sequences:
        return 0.0
    tpot_s, later, usual = at.usual_tpot_s, 0.0, turn.output_tokens if turn.output_tokens > 1 else 1
    for length in STREAM_LENGTHS:
        later += miss(tpot_s + beside_s / (length * usual), target_s, TPOT_SPREAD)
    misses = later / len(STREAM_LENGTHS)
    return at.sequences * (misses - usual_misses) if misses > usual_misses else 0.0


def _queued(work: Work, turn: Turn, target_s: float, rules: Rules) -> float:
    """Prompts to come that this one makes too late, where it is computed: at the rate of late, and as sessions return
    while it is.

    Those that return add little to their prompts, so they bear no more than their target.
    """
    at, prefill_s, holds_s = work.at, work.prefill_s, work.holds_s
    recent = at.rate * _late(holds_s, at.patience_s)
    if rules.returns is None:
        return recent * prefill_s
    if at.view.worker.role is _PREFILL and not rules.prefills_answer:  # no session returns there
        return RECENT_WEIGHT * recent * prefill_s
    returning = rules.returns.within(prefill_s, at.view.id, turn.model, at.now_s) * _late(holds_s, target_s)
    return returning + RECENT_WEIGHT * recent * prefill_s


def _late(holds_s: float, patience_s: float) -> float:
    """Chance that a prompt which comes while another is computed misses its target: it waits for the rest of that, or
    for the rest of its part in a step."""
    if holds_s <= patience_s:
        return holds_s / (2.0 * patience_s)
    return 1.0 - patience_s / (2.0 * holds_s)
