"""What a decision says of its turn's times, and what they came to."""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from ..decision_table.score import Evidence
from ..decision_table.table import ScoredTable
from ..fleet.view import WorkerView
from ..laws.corrections import TPOT, TTFT, Figure, Measured
from ..laws.prediction import EngineLaws, Prediction
from ..laws.worker_laws import TableTime, TurnTimes, WorkerLaws, likes_of
from ..policy import Decision, Route, Turn

LEAST_OUTPUT_TOKENS = 8  # of an answer whose TPOT says something
AS_FORESEEN = 2.0  # a prompt of which so many times more or fewer tokens were computed says nothing of the laws
FEW_TOKENS = 64  # by which it may differ whatever its size: the ends of blocks

_INSIDE = Evidence.INSIDE  # quicker to look up
_LOCAL, _SPLIT, _READBACK = Route.LOCAL, Route.SPLIT, Route.READBACK


class Foreseen(msgspec.Struct, frozen=True, gc=False):
    """Of one attempt; the times that it has measured are not known yet."""

    times: TurnTimes
    new_tokens: int  # to be computed by the engine that computes the prompt

    @property
    def without_ttft(self) -> Foreseen:
        """Of a turn whose first token waits for more than was foreseen."""
        times = self.times
        return replace(
            self,
            times=replace(
                times,
                by_profile=[one for one in times.by_profile if one.figure is not TTFT],
                by_table=[one for one in times.by_table if one.figure is not TTFT],
            ),
        )


def foresee(decision: Decision, turn: Turn, laws: WorkerLaws, scored: ScoredTable | None) -> Foreseen | None:
    """None where neither the laws nor the table say anything."""
    by_table = _by_table(decision, scored)
    computing = decision.prefill or decision.decode
    held = 0 if decision.route is _READBACK else turn.held_by(computing)
    new_tokens = max(1, turn.prompt_tokens - held - decision.fetched_tokens)
    by_profile: tuple[Measured, ...] = ()
    is_guess = False
    prediction = decision.prediction
    if prediction is not None:
        of_prompt, of_decode = laws.of(computing), laws.of(decision.decode)
        if of_prompt is not None and of_decode is not None:
            context = turn.prompt_tokens + turn.output_tokens
            is_guess = of_prompt.is_guess(context, new_tokens) or of_decode.is_guess(context, 0)
            by_profile = (_ttft(prediction, computing, of_prompt), _tpot(prediction, decision.decode, of_decode))
    if not by_profile and not by_table:
        return None
    return Foreseen(TurnTimes(laws.resets, by_profile, by_table, is_guess), new_tokens)


def _ttft(prediction: Prediction, view: WorkerView, laws: EngineLaws) -> Measured:
    plain_s = prediction.ttft_s / (prediction.ttft_factor or laws.ttft_factor)
    likes = likes_of(laws.profile, view.worker)
    return Measured(view.id, view.incarnation, likes, TTFT, plain_s, laws.ttft_factor, math.nan)


def _tpot(prediction: Prediction, view: WorkerView, laws: EngineLaws) -> Measured:
    plain_s = prediction.tpot_s / (prediction.tpot_factor or laws.tpot_factor)
    likes = likes_of(laws.profile, view.worker)
    return Measured(view.id, view.incarnation, likes, TPOT, plain_s, laws.tpot_factor, math.nan)


def _by_table(decision: Decision, scored: ScoredTable | None) -> tuple[TableTime, ...]:
    """Where one measured cell stands for the turn."""
    verdict = decision.verdict
    if verdict is None or scored is None or verdict.evidence is not _INSIDE:
        return ()
    is_local = decision.route is _LOCAL
    if not is_local and decision.route is not _SPLIT:
        return ()
    arm = scored.arm(verdict.cell, local=is_local)
    if arm is None:
        return ()
    table, means = scored.table.name, {TTFT: arm.ttft_s.mean, TPOT: arm.tpot_s.mean}
    return tuple(TableTime(table, figure, mean_s, math.nan) for figure, mean_s in means.items())


def came_to(
    foreseen: Foreseen,
    ttft_s: float,
    tpot_s: float | None,
    *,
    computed_tokens: int | None,
    output_tokens: int,
    choices: int,
) -> TurnTimes:
    """The times of a whole answer; what was computed or answered otherwise than foreseen is left out.

    computed_tokens: of the prompt, where the engine says so.
    """
    measured: dict[Figure, float] = {}
    if computed_tokens is None or _is_near(computed_tokens, foreseen.new_tokens):
        measured[TTFT] = ttft_s
    if tpot_s is not None and output_tokens >= LEAST_OUTPUT_TOKENS and choices == 1:
        measured[TPOT] = tpot_s
    times = foreseen.times
    return replace(
        times,
        by_profile=[
            replace(one, measured_s=measured[one.figure]) for one in times.by_profile if one.figure in measured
        ],
        by_table=[replace(one, measured_s=measured[one.figure]) for one in times.by_table if one.figure in measured],
    )


def _is_near(computed: int, foreseen: int) -> bool:
    if abs(computed - foreseen) <= FEW_TOKENS:
        return True
    return foreseen <= AS_FORESEEN * computed and computed <= AS_FORESEEN * foreseen
