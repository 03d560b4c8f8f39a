"""The records as a page of Markdown: a summary, and for each part a table of goodput and one of what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ppd.offline.goodput.modes import NAMES, ORACLE
from ppd.proxy.config import Mode

from .campaign import COMMON_SHARE, Campaign
from .cells import PARTS, Cell
from .records import AtRate, CellRecord
from .summary import Ratios, Standing, compared, is_alone, ratios, standings

Found = Mapping[str, Mapping[str, CellRecord]]
AGAINST = (
    *(mode.value for mode in (Mode.SESSION_HASH, Mode.ALWAYS_LOCAL, Mode.CONDITIONAL, Mode.SLACK, Mode.LEAST_TTFT)),
    ORACLE,
)
"""Single modes that an operator may choose for all traces, and the forecast that nobody has."""


def page(campaign: Campaign, parts: Sequence[str], found: Found, notes: Sequence[str] = ()) -> str:
    lines = ["# Modes compared", "", *_method(campaign), *(f"- {note}" for note in notes), ""]
    cells = [cell for cell in campaign.cells if cell.name in found]
    lines += ["## Summary", "", *_summary(campaign, parts, cells, found), ""]
    for part in parts:
        here = [cell for cell in PARTS[part] if cell.name in found]
        if not here:
            continue
        lines += [f"## {part.capitalize()}", "", f"![goodput](policies-{part}.png)", ""]
        for question in campaign.method.questions:
            if not any(standings(found[cell.name], question.name) for cell in here):
                lines += [f"Not measured: {question.name}.", ""]
                continue
            lines += [f"Sessions a second, {question.name} (mean of {question.seeds} seeds, spread in %):", ""]
            lines += [*_goodput(here, found, question.name), ""]
        lines += [f"All modes at {COMMON_SHARE:g} x the best other mode's goodput:", "", *_at_rate(here, found), ""]
    return "\n".join(lines)


def _method(campaign: Campaign) -> Iterator[str]:
    method = campaign.method
    yield (
        f"- Simulated: {method.hardware}, connector `{method.connector}`; TTFT at most max(250 ms, 3 x "
        "unloaded) and the mean TPOT at most as named, of first turns and of later turns, each by itself."
    )
    yield (
        f"- A window holds at least {method.sessions} sessions and {method.later_turns} later turns; rates are "
        f"{method.precision:.0%} apart. A bold mode is the best of its cell."
    )


def _summary(campaign: Campaign, parts: Sequence[str], cells: Sequence[Cell], found: Found) -> Iterator[str]:
    subject = campaign.subject
    yield f"| `{subject}` beside | cells | question | geometric mean | least | where | best other meets it nowhere |"
    yield "|---|---:|---|---:|---:|---|---:|"
    for part in parts:
        here = [cell for cell in PARTS[part] if cell in cells]
        if not here or is_alone(subject, here, found):
            continue
        measured = set[str]()
        for question in campaign.method.questions:
            for other in (None, *AGAINST):
                beside = compared(here, found, question.name, subject, other)
                measured |= {other} if other and beside else set()
                if (over := ratios(beside)) is not None:
                    yield _row(f"{part}: {other or 'the best other of each cell'}", *_over(over, question.name))
        yield from (f"| {part}: {mode} | not measured | | | | | |" for mode in AGAINST if mode not in measured)


def _over(over: Ratios, question: str) -> tuple[str, ...]:
    mean, least = f"{over.geometric_mean:.2f}", f"{over.least:.2f}"
    return str(over.cells), question, mean, least, over.worst.name, str(over.without)


def _goodput(cells: Sequence[Cell], found: Found, question: str) -> Iterator[str]:
    modes = shown(cells, found)
    yield _row("cell", *modes)
    yield "|---" + "|---:" * len(modes) + "|"
    for cell in cells:
        known = standings(found[cell.name], question)
        by_mode = {one.mode: one for one in known}
        best = known[0].mean if known else 0.0
        yield _row(cell.name, *(_rate(by_mode.get(mode), best) for mode in modes))


def shown(cells: Sequence[Cell], found: Found) -> list[str]:
    """The modes of which there is anything."""
    known = dict.fromkeys(mode for cell in cells for mode in found[cell.name])
    return sorted(known, key=lambda mode: NAMES.index(mode) if mode in NAMES else len(NAMES))


def _rate(one: Standing | None, best: float) -> str:
    if one is None:
        return ""
    text = f"{one.mean:.3g} ({one.spread:.0%})" if one.mean else "0"
    return f"**{text}**" if one.mean and one.mean == best else text


def _at_rate(cells: Sequence[Cell], found: Found) -> Iterator[str]:
    yield _row(
        *("cell", "rate", "mode", "within the SLO: first", "later", "TTFT first p50 / p99", "later p50 / p99"),
        *("TPOT p50 / p99", "KV moved a turn", "computed again", "prefill / needed"),
    )
    yield "|---|---:|---" + "|---:" * 8 + "|"
    for cell in cells:
        known = [(mode, one.at_rate) for mode, one in found[cell.name].items() if one.at_rate is not None]
        for mode, at in sorted(known, key=lambda one: -min(one[1].first_share, one[1].later_share)):
            yield _row(cell.name, f"{at.rate:.3g}", mode, *_figures(at))


def _figures(at: AtRate) -> tuple[str, ...]:
    return (
        f"{at.first_share:.1%}",
        f"{at.later_share:.1%}",
        _pair(at.ttft_first),
        _pair(at.ttft_later),
        _pair(at.tpot),
        f"{at.moved_bytes_a_turn / 1e6:.0f} MB",
        f"{at.recomputed_share:.1%}",
        f"{at.prefill_ratio:.2f}",
    )


def _pair(times_s: tuple[float | None, float | None]) -> str:
    return " / ".join("-" if time_s is None else _ms(time_s) for time_s in times_s) + " ms"


def _ms(time_s: float) -> str:
    return f"{1000 * time_s:.1f}" if time_s < 0.1 else f"{1000 * time_s:,.0f}"


def _row(*values: str) -> str:
    return f"| {' | '.join(values)} |"
