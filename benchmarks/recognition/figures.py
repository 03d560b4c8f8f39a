"""What a run's records come to: one row of the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from statistics import fmean, stdev

import msgspec

from ppd.proxy.decision_table.score import Weights
from ppd.proxy.decision_table.table import DecisionTable, ScoredTable, TableQuery, find
from ppd.proxy.policy import Route

from .engines.block_cache import BLOCK_TOKENS
from .play import TurnRecord

HARM_SHARE = (
    0.5  # a claim of which less is there does harm: the whole prompt is computed where few tokens were expected
)
RIGHT_CLAIM_TOKENS = 2 * BLOCK_TOKENS  # a claim of which no more is missing is right, as engines keep whole blocks
LOST = ("first", "lost")
TABLE = "h100-llama-3.1-8b-1P_3D"
TABLE_QPS = 4.0


class BeliefFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Shares are of follow-ups, those of tokens of their prompts. None: nothing to say."""

    turns: int
    local: float | None  # of those that could be
    right: float  # to a worker that holds as much as any
    lost: float | None
    harm: float | None
    claimed: float | None  # tokens
    there: float  # tokens
    best: float  # tokens
    reused: float  # tokens of all prompts that nobody computed
    possible: float  # tokens of all prompts, where nothing is ever forgotten
    first: float | None  # tokens of first turns that nobody computed
    first_possible: float | None  # and where nothing is ever forgotten
    computed: int  # tokens
    busiest: float  # turns of the busiest worker that answers, over the mean
    flips: float | None  # decisions of the table that change when given the truth
    users_flips: float | None  # the same of those that end in a user's message
    estimate: float | None  # mean error of new tokens where what is claimed is there, relative


def figures(records: Sequence[TurnRecord], busiest: float) -> BeliefFigures:
    later = [one for one in records if one.follows]
    firsts = [one for one in records if not one.follows]
    believed = [one for one in later if one.claimed is not None]
    claims = [one for one in believed if one.claimed and one.route is not Route.SPLIT]
    prompts, all_prompts = _sum(later, "prompt"), _sum(records, "prompt")
    scored = _scored()
    judged = [one for one in believed if one.claimed]
    return BeliefFigures(
        turns=len(records),
        local=_share([one for one in later if one.route is not Route.REPLICA], lambda one: one.route is Route.LOCAL),
        right=_share(later, lambda one: one.chosen >= one.best) or 0.0,
        lost=_share(believed, lambda one: one.kind in LOST),
        harm=_of(len(believed), sum(one.held < (one.claimed or 0) * HARM_SHARE for one in claims)),
        claimed=_of(prompts, _sum(believed, "claimed")) if believed else None,
        there=_of(prompts, _sum(later, "held")) or 0.0,
        best=_of(prompts, _sum(later, "best")) or 0.0,
        reused=1.0 - (_of(all_prompts, _sum(records, "computed")) or 0.0),
        possible=_of(all_prompts, _sum(records, "possible")) or 0.0,
        first=_of(_sum(firsts, "prompt"), _sum(firsts, "prompt") - _sum(firsts, "computed")),
        first_possible=_of(_sum(firsts, "prompt"), _sum(firsts, "possible")),
        computed=_sum(records, "computed"),
        busiest=busiest,
        flips=_share(judged, lambda one: _flips(one, scored)),
        users_flips=_share([one for one in judged if one.is_users], lambda one: _flips(one, scored)),
        estimate=_estimate_error(judged),
    )


@lru_cache
def _scored() -> ScoredTable:
    return ScoredTable(DecisionTable.load(find(TABLE)), Weights())


def _flips(one: TurnRecord, scored: ScoredTable) -> bool:
    claimed = one.claimed or 0
    believed = TableQuery(max(1, one.believed_prompt - claimed), claimed, one.believed_output, TABLE_QPS)
    truth = TableQuery(max(1, one.prompt - one.held), one.held, one.believed_output, TABLE_QPS)
    return scored.lookup(believed).local != scored.lookup(truth).local


def _estimate_error(judged: Iterable[TurnRecord]) -> float | None:
    """Of turns whose claim is there: what is left is the estimate of the text beyond it."""
    errors = [
        abs(one.believed_prompt - one.prompt) / max(1, one.prompt - (one.claimed or 0))
        for one in judged
        if (one.claimed or 0) - one.held <= RIGHT_CLAIM_TOKENS and one.prompt > (one.claimed or 0)
    ]
    return fmean(errors) if errors else None


def _sum(records: Iterable[TurnRecord], name: str) -> int:
    return sum(getattr(one, name) or 0 for one in records)


def _of(whole: int, part: int) -> float | None:
    return part / whole if whole else None


def _share(records: Collection[TurnRecord], holds: Callable[[TurnRecord], bool]) -> float | None:
    return _of(len(records), sum(map(holds, records)))


HEADS = (
    *("turns", "LOCAL %", "right %", "lost %", "harm %", "claimed %", "there %", "best %", "reused %", "possible %"),
    *("first %", "first possible %", "computed k", "x best", "busiest", "flips %", "after user's %", "estimate"),
)


def cells(found: BeliefFigures, best: int | None) -> list[str]:
    """best: tokens that a clairvoyant computes; None: not known."""
    shares = (found.local, found.right, found.lost, found.harm, found.claimed, found.there, found.best)
    percents = [_percent(share) for share in (*shares, found.reused, found.possible, found.first, found.first_possible)]
    flips = [_percent(found.flips), _percent(found.users_flips)]
    estimate = "-" if found.estimate is None else f"{found.estimate:.2f}"
    return [
        str(found.turns),
        *percents,
        f"{found.computed / 1000:.0f}",
        f"{found.computed / best:.2f}" if best else "-",
        f"{found.busiest:.2f}",
        *flips,
        estimate,
    ]


LIMIT = 0.01
"""Of the prompts or requests that a share is of; of tokens, of their mean with one process."""

SPREAD_HEADS = ("LOCAL %", "claimed less there %", "harm %", "lost %", "computed k", "within 1 %")


class _Compared(msgspec.Struct, frozen=True):
    """One figure of runs that differ by chance alone, shown in units."""

    of: Callable[[BeliefFigures], float | None]
    unit: float
    is_share: bool = True


_COMPARED = (
    _Compared(lambda found: found.local, 0.01),
    _Compared(lambda found: None if found.claimed is None else found.claimed - found.there, 0.01),
    _Compared(lambda found: found.harm, 0.01),
    _Compared(lambda found: found.lost, 0.01),
    _Compared(lambda found: found.computed, 1000.0, is_share=False),
)


def spread_cells(runs: Sequence[BeliefFigures], others: Sequence[BeliefFigures] | None) -> list[str]:
    """Each figure's mean, with its standard deviation from run to run.

    others: as many runs, of the same sessions at the same moments, with which these are compared. Then each figure's
    difference is there too, with twice its standard error, and at the end whether the differences are below the limit:
    `yes` and `no` where chance does not change that, else `open`.
    """
    shown, verdicts = list[str](), set[str]()
    for compared in _COMPARED:
        own = _values(compared, runs)
        if not own:
            shown.append("-")
            continue
        mean, deviation = fmean(own), stdev(own) if len(own) > 1 else 0.0
        cell = _number(mean) + f" ({_number(deviation)})"
        if others is not None:
            known = _values(compared, others)
            limit = LIMIT * (1.0 / compared.unit if compared.is_share else fmean(known))
            differs, error = difference(own, known)
            cell += f", {differs:+.{_digits(mean)}f} ± {_number(error, _digits(mean))}"
            verdicts.add(verdict(differs, error, limit))
        shown.append(cell)
    return [*shown, next((one for one in ("no", "open", "yes") if one in verdicts), "-")]


def difference(runs: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Of the means, run by run, and twice the standard error of that; infinite where one run says nothing of it."""
    each = [run - other for run, other in zip(runs, others, strict=True)]
    return fmean(each), 2.0 * stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.inf


def _values(compared: _Compared, runs: Iterable[BeliefFigures]) -> list[float]:
    return [value / compared.unit for run in runs if (value := compared.of(run)) is not None]


def verdict(differs: float, error: float, limit: float) -> str:
    if abs(differs) + error <= limit:
        return "yes"
    return "no" if abs(differs) - error > limit else "open"


def _digits(value: float) -> int:
    return 0 if abs(value) >= 1000 else 2 if abs(value) < 1 else 1


def _number(value: float, digits: int | None = None) -> str:
    return f"{value:.{_digits(value) if digits is None else digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f}"
