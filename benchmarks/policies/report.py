"""The records as a page of Markdown: a summary, and for each part a table of goodput and one of what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ppd.offline.goodput.modes import NAMES, ORACLE
from ppd.proxy.config import Mode

from .campaign import COMMON_SHARE, Campaign
from .cells import PARTS, Cell
from .records import AtRate, CellRecord
from .summary import Comparison, Ratios, Standing, changes, compared, is_alone, ratios, standing, standings

Found = Mapping[str, Mapping[str, CellRecord]]
AGAINST = (
    *(mode.value for mode in (Mode.SESSION_HASH, Mode.ALWAYS_LOCAL, Mode.CONDITIONAL, Mode.SLACK, Mode.LEAST_TTFT)),
    ORACLE,
)
"""Single modes that an operator may choose for all traces, and the forecast that nobody has."""
CAUTION = "A record knows no version of the code: one of the two may be older."


def page(campaign: Campaign, parts: Sequence[str], found: Found, notes: Sequence[str] = ()) -> str:
    lines = ["# Modes compared", "", *_method(campaign), *(f"- {note}" for note in notes), ""]
    cells = [cell for cell in campaign.cells if cell.name in found]
    lines += ["## Summary", "", *_summary(campaign, parts, cells, found), ""]
    lines += _variants(campaign, cells, found)
    for part in parts:
        here = [cell for cell in PARTS[part] if cell.name in found]
        if not here:
            continue
        lines += [f"## {part.capitalize()}", ""]
        tables = _alone if is_alone(campaign.subject, here, found) else _modes
        lines += tables(campaign, part, here, found)
    return "\n".join(lines)


def _modes(campaign: Campaign, part: str, here: Sequence[Cell], found: Found) -> Iterator[str]:
    yield from (_figure(part), "")
    for question in campaign.method.questions:
        if not any(standings(found[cell.name], question.name) for cell in here):
            yield from (f"Not measured: {question.name}.", "")
            continue
        yield from (f"Sessions a second, {question.name} (mean of {question.seeds} seeds, spread in %):", "")
        yield from (*_goodput(here, found, question.name), "")
    yield from (
        f"All modes at {COMMON_SHARE:g} x the best other mode's goodput:",
        "",
        *_at_rate(here, found, campaign.question.tpot_s),
        "",
    )


def _figure(part: str) -> str:
    return f"![goodput](policies-{part}.png)"


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


def _variants(campaign: Campaign, cells: Sequence[Cell], found: Found) -> Iterator[str]:
    """What each variant makes of the subject, over all cells."""
    subject = campaign.subject
    made = changes(cells, found, campaign.question_names, subject)
    if not made:
        return
    yield from (f"`{subject}` in each variant, over itself in the usual one. {CAUTION}", "")
    yield "| variant | cells | question | geometric mean | least | where | most | where |"
    yield "|---|---:|---|---:|---:|---|---:|---|"
    for variant in dict.fromkeys(cell.variant for cell in cells):
        for question, known in made.items():
            if (over := ratios([one for one in known if one.cell.variant == variant])) is not None:
                mean, least, most = (f"{ratio:.2f}" for ratio in (over.geometric_mean, over.least, over.most))
                yield _row(variant, str(over.cells), question, mean, least, over.worst.name, most, over.best.name)
    yield ""


def _alone(campaign: Campaign, part: str, here: Sequence[Cell], found: Found) -> Iterator[str]:
    """Of a part without other modes: the subject beside itself in the usual variant."""
    subject, names = campaign.subject, campaign.question_names
    made = changes(here, found, names, subject)
    if made:
        yield from (_figure(part), "")
    answered = [name for name in names if any(standing(found, cell, subject, name) for cell in here)]
    if missing := [*_missing(part, here), *(name for name in names if name not in answered)]:
        yield from (f"Not measured: {', '.join(missing)}.", "")
    yield (
        f"Sessions a second of `{subject}` (mean over seeds, spread in %), and that over the usual variant's (range "
        f"over seeds: each plays the same sessions in both). {CAUTION}"
    )
    yield ""
    yield _row("cell", *(heading for name in answered for heading in (name, "over usual")))
    yield "|---" + "|---:|---:" * len(answered) + "|"
    beside = {(one.cell, name): one for name, known in made.items() for one in known}
    for cell in dict.fromkeys(one for changed in here for one in (changed.usual, changed)):
        rates = [standing(found, cell, subject, name) for name in answered]
        over = ["" if cell == cell.usual else _change(beside.get((cell, name))) for name in answered]
        yield _row(cell.name, *(text for rate, ratio in zip(rates, over, strict=True) for text in (_own(rate), ratio)))
    yield ""


def _missing(part: str, here: Sequence[Cell]) -> Iterator[str]:
    """Variants."""
    measured = {cell.variant for cell in here}
    yield from dict.fromkeys(cell.variant for cell in PARTS[part] if cell.variant not in measured)


def _own(one: Standing | None) -> str:
    return "not measured" if one is None else _rate(one, math.inf)


def _change(one: Comparison | None) -> str:
    if one is None:
        return "–"
    low, high = one.seed_range
    return f"{one.ratio:.2f} ({low:.2f} to {high:.2f})"


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


def _at_rate(cells: Sequence[Cell], found: Found, tpot_s: float) -> Iterator[str]:
    yield _row(
        *("cell", "rate", "mode", "within the SLO: first", "later", "TTFT first p50 / p99", "later p50 / p99"),
        *("TPOT p50 / p99", "KV moved a turn", "computed again", "prefill / needed"),
    )
    yield "|---|---:|---" + "|---:" * 8 + "|"
    for cell in cells:
        known = [(mode, at) for mode, one in found[cell.name].items() if (at := one.played(tpot_s)) is not None]
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
