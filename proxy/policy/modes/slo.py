"""The fewest turns that miss their targets: this one, and those that it would delay."""

from __future__ import annotations

import math

from ...laws.prediction import Outlook
from ..candidates import Candidates
from ..decision import Preference, Rules, Turn
from ..ways import Terms, Way, best_way
from .predicted import miss, ttft_limit_s

TTFT_SPREAD, TPOT_SPREAD = 0.35, 0.15  # of the logarithm of predictions' errors
LEAST_HEADROOM = 0.1  # of the TPOT target: streams that have less count as having this
USUAL_OUTPUT = 300  # tokens of the answers there
QUEUE_WEIGHT = 1.0
WORK_WEIGHT = 0.02  # of what is close in all else, the way that takes less of the fleet
MOVE_WEIGHT = 0.005


def slo(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    return best_way(turn, candidates, rules, expected_misses)


def expected_misses(turn: Turn, way: Way, rules: Rules) -> Terms:
    prediction, targets = way.prediction, turn.slo
    limit_s = ttft_limit_s(turn, way, rules)
    computing, decode = way.computing, way.decode
    return {
        "ttft": miss(prediction.ttft_s, limit_s, TTFT_SPREAD),
        "tpot": miss(prediction.tpot_s, targets.tpot_s, TPOT_SPREAD),
        "streams": _stalled(computing, prediction.prefill_s, targets.tpot_s),
        "batch": decode.sequences * _crowded(decode, prediction.tpot_s, targets.tpot_s),
        "queue": QUEUE_WEIGHT * _queued(computing, prediction.prefill_s),
        "work": WORK_WEIGHT * (prediction.ttft_s / limit_s + prediction.tpot_s / targets.tpot_s),
        "moved": MOVE_WEIGHT * prediction.transfer_s / limit_s,
    }


def _stalled(at: Outlook, stall_s: float, target_s: float) -> float:
    """Streams that miss their TPOT as a prompt stands in their way once.

    One with n tokens can bear n times its headroom. Lengths of answers are taken as exponential, so those of running
    streams follow a gamma distribution of shape 2, as long ones are there for longer.
    """
    if not at.sequences:
        return 0.0
    tpot_s = at.laws.tpot_factor * at.step_s / (1.0 - at.busy)
    headroom_s = max(target_s - tpot_s, LEAST_HEADROOM * target_s)
    tokens = stall_s / headroom_s / USUAL_OUTPUT
    return at.sequences * (1.0 - (1.0 + tokens) * math.exp(-tokens))


def _crowded(at: Outlook, tpot_s: float, target_s: float) -> float:
    """What a sequence more adds to each other's chance to miss the TPOT."""
    if not at.sequences:
        return 0.0
    before_s = at.laws.tpot_factor * at.step_s / (1.0 - at.busy)
    return max(0.0, miss(tpot_s, target_s, TPOT_SPREAD) - miss(before_s, target_s, TPOT_SPREAD))


def _queued(at: Outlook, prefill_s: float) -> float:
    """Prompts to come that this one makes too late, at the rate of late.

    One that comes while it is computed waits for the rest of it, and misses its target by as much of its patience.
    """
    if prefill_s <= at.patience_s:
        return at.rate * prefill_s * prefill_s / (2.0 * at.patience_s)
    return at.rate * (prefill_s - at.patience_s / 2.0)
