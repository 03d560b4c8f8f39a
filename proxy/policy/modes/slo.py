"""The fewest turns that miss their targets: this one, and those that it would delay."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

from ...fleet.worker import WorkerId
from ...laws.prediction import Outlook
from ..candidates import Candidates
from ..decision import Preference, Rules, Turn
from ..ways import Terms, Way, best_way, ttft_limit_s
from .predicted import miss

TTFT_SPREAD, TPOT_SPREAD = 0.35, 0.15  # of the logarithm of predictions' errors
LEAST_HEADROOM = 0.1  # of the TPOT target: streams that have less count as having this
USUAL_OUTPUT = 300  # tokens of the answers there
QUEUE_WEIGHT = 1.0
WORK_WEIGHT = 0.02  # of what is close in all else, the way that takes less of the fleet
MOVE_WEIGHT = 0.005


def slo(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    return best_way(turn, candidates, rules, partial(expected_misses, {}))


def expected_misses(slowed: dict[WorkerId, Slowed], turn: Turn, way: Way, rules: Rules) -> Terms:
    """slowed: of the workers of the ways before, on which the turn would decode."""
    prediction, targets = way.prediction, turn.slo
    limit_s = ttft_limit_s(turn, way)
    computing, decode = way.computing, way.decode
    by_batch = slowed.get(decode.view.id)
    if by_batch is None:
        by_batch = slowed[decode.view.id] = Slowed.of(decode, targets.tpot_s)
    return {
        "ttft": miss(prediction.ttft_s, limit_s, TTFT_SPREAD),
        "tpot": by_batch.own,
        "streams": _stalled(computing, prediction.prefill_s, targets.tpot_s),
        "batch": by_batch.others,
        "queue": QUEUE_WEIGHT * _queued(computing, prediction.prefill_s),
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


def _stalled(at: Outlook, stall_s: float, target_s: float) -> float:
    """Streams that miss their TPOT as a prompt stands in their way once.

    One with n tokens can bear n times its headroom. Lengths of answers are taken as exponential, so those of running
    streams follow a gamma distribution of shape 2, as long ones are there for longer.
    """
    if not at.sequences:
        return 0.0
    headroom_s = max(target_s - at.usual_tpot_s, LEAST_HEADROOM * target_s)
    tokens = stall_s / headroom_s / USUAL_OUTPUT
    return at.sequences * (1.0 - (1.0 + tokens) * math.exp(-tokens))


def _queued(at: Outlook, prefill_s: float) -> float:
    """Prompts to come that this one makes too late, at the rate of late.

    One that comes while it is computed waits for the rest of it, and misses its target by as much of its patience.
    """
    if prefill_s <= at.patience_s:
        return at.rate * prefill_s * prefill_s / (2.0 * at.patience_s)
    return at.rate * (prefill_s - at.patience_s / 2.0)
