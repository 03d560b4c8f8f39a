"""Rules that go by what the laws predict of each way to serve a turn."""

from __future__ import annotations

from functools import partial

from ...decision_table.score import Weights
from ..candidates import Candidates
from ..decision import Preference, Rules, Turn
from ..ways import Terms, Way, best_way


def least_ttft(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    """The earliest first token."""
    return best_way(turn, candidates, rules, lambda way: {"ttft": way.prediction.ttft_s})


def weights(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    """The paper's weights, on predicted seconds instead of measured cells: both relative to an idle engine."""
    return best_way(turn, candidates, rules, partial(_weighted, turn.weights or rules.weights))


def _weighted(weights: Weights, way: Way) -> Terms:
    at, prediction = way.decode, way.prediction
    return {
        "ttft": weights.ttft * prediction.ttft_s / at.idle.ttft_s,
        "tpot": weights.tpot * prediction.tpot_s / at.laws.costs.step_s,
    }


def lmetric(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    """LMetric: the least product of new tokens, with those that queue, and the batch."""
    return best_way(turn, candidates, rules, partial(_product, turn))


def _product(turn: Turn, way: Way) -> Terms:
    at = way.computing
    new = turn.prompt_tokens - way.held(turn) - way.work.fetched_tokens
    return {"product": (at.view.queued_prefill_tokens + new) * (way.decode.sequences + 1)}


def slack(turn: Turn, candidates: Candidates, rules: Rules) -> Preference:
    """AMPD: of the ways whose TTFT keeps the target, the one with the least TPOT; else the earliest first token."""
    return best_way(turn, candidates, rules, partial(_slack, turn))


def _slack(turn: Turn, way: Way) -> Terms:
    prediction, late_s = way.prediction, 0.0
    limit_s = turn.slo.ttft_limit_s(way.computing.idle.ttft_s)
    if prediction.ttft_s > limit_s:
        late_s = 1000.0 * prediction.ttft_s
    return {"late": late_s, "tpot": prediction.tpot_s, "streams": _delay_s(way)}


def _delay_s(way: Way) -> float:
    """What each token of the streams there is delayed, if they have as many to come as this one."""
    at = way.computing
    return way.prediction.prefill_s * at.sequences / 1000.0
