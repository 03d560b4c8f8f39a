"""What a run's records come to: one row of the table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from statistics import fmean

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


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f}"
