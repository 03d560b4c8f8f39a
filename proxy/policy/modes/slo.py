"""The fewest turns that miss their targets: this one, and those that it would delay."""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from typing import NamedTuple

from msgspec.structs import replace

from ...fleet.worker import WorkerId
from ...laws.prediction import Outlook
from ..candidates import Candidates
from ..decision import Preference, Rules, Turn
from ..ways import Terms, Way, best_way, ttft_limit_s
from .predicted import miss

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
WORK_WEIGHT = 0.02  # of what is close in all else, the way that takes less of the fleet
MOVE_WEIGHT = 0.005


def slo(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    preference = best_way(turn, candidates, rules, partial(expected_misses, {}))
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


def expected_misses(slowed: dict[WorkerId, Slowed], turn: Turn, way: Way, rules: Rules) -> Terms:
    """slowed: of the workers of the ways before, on which the turn would decode."""
    prediction, targets = way.prediction, turn.slo
    limit_s = ttft_limit_s(turn, way)
    computing, decode = way.computing, way.decode
    by_batch = slowed.get(decode.view.id)
    if by_batch is None:
        by_batch = slowed[decode.view.id] = Slowed.of(decode, targets.tpot_s)
    return {
        "ttft": miss(prediction.ttft_s, limit_s, computing.laws.ttft_spread),
        "tpot": by_batch.own,
        "streams": _stalled(computing, prediction.beside_s, turn),
        "batch": by_batch.others,
        "queue": _queued(turn, way, rules),
        "evicted": EVICTED_WEIGHT * _evicted(turn, way, rules),
        "work": WORK_WEIGHT * (prediction.ttft_s / limit_s + prediction.tpot_s / targets.tpot_s),
        "moved": MOVE_WEIGHT * prediction.transfer_s / limit_s,
    }


class Slowed(NamedTuple):
    """Expected misses of the TPOT target as a turn decodes on a worker, whichever way it comes there."""

    own: float
    others: float  # more than without it

    @classmethod
    def of(cls, at: Outlook, target_s: float) -> Slowed:
        own = miss(at.tpot_s, target_s, TPOT_SPREAD)
        if not at.sequences:
            return cls(own, 0.0)
        return cls(own, at.sequences * max(0.0, own - miss(at.usual_tpot_s, target_s, TPOT_SPREAD)))


def _stalled(at: Outlook, beside_s: float, turn: Turn) -> float:
    """Streams that miss their TPOT as a prompt delays them once: the shorter an answer, the more by each delay."""
    if not at.sequences:
        return 0.0
    tpot_s, target_s, usual = at.usual_tpot_s, turn.slo.tpot_s, max(1, turn.output_tokens)
    later = [miss(tpot_s + beside_s / (length * usual), target_s, TPOT_SPREAD) for length in STREAM_LENGTHS]
    return at.sequences * max(0.0, sum(later) / len(later) - miss(tpot_s, target_s, TPOT_SPREAD))


def _queued(turn: Turn, way: Way, rules: Rules) -> float:
    """Prompts to come that this one makes too late, where it is computed: at the rate of late, and as sessions return.

    Those that return add little to their prompts, so they bear no more than their target.
    """
    at, prefill_s = way.computing, way.prediction.prefill_s
    recent = at.rate * _late(prefill_s, at.patience_s)
    if rules.returns is None:
        return recent * prefill_s
    returning = rules.returns.rate(at.view.id, turn.model, at.now_s) * _late(prefill_s, turn.slo.ttft_s)
    return (returning + RECENT_WEIGHT * recent) * prefill_s


def _late(prefill_s: float, patience_s: float) -> float:
    """Chance that a prompt which comes while another is computed misses its target: it waits for the rest of that."""
    if prefill_s <= patience_s:
        return prefill_s / (2.0 * patience_s)
    return 1.0 - patience_s / (2.0 * prefill_s)


def _evicted(turn: Turn, way: Way, rules: Rules) -> float:
    """Turns that are likely to come back and find their KV evicted for this one's."""
    returns, now_s = rules.returns, way.decode.now_s
    if returns is None:
        return 0.0
    decode, prefill, prompt = way.decode.view, way.prefill, turn.prompt_tokens
    written = prompt - turn.held_by(decode) + turn.output_tokens
    if not turn.held_tokens:
        written += GROWTH * prompt
    lost = returns.lost(decode.id, turn.model, written, now_s)
    if prefill is not None:
        lost += returns.lost(prefill.view.id, turn.model, prompt - way.held(turn), now_s)
    return lost
