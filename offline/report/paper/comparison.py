"""The paper's tables 1, 2 and 4 beside the same figures computed from the published rows, and why they differ."""

from __future__ import annotations

from collections.abc import Sequence

from ...experiment.cells import MeasuredCell
from ..analysis.arms import MODES, Arm, arms, modes
from ..analysis.failures import failure_rates
from ..analysis.gains import PAPER_QPS, Band, bands
from ..analysis.winners import OBJECTIVES, TPOT, TTFT, Wins, disagreement, wins
from ..page.document import Section, Table, Text
from ..page.numerals import NONE, percent, signed, signed_percent
from . import readings
from .readings import PRINTED_DISAGREEMENT, PRINTED_FAILURE_QPS, PRINTED_FAILURES, PRINTED_GAINS, PRINTED_WINS


def sections(cells: Sequence[MeasuredCell]) -> list[Section]:
    """`cells`: of the published grid, or a part of it. Tables 1 and 4 need the topologies that they print."""
    made = (_table_1(cells), _table_2(cells), _table_4(cells))
    return [section for section in made if section is not None]


def _table_1(cells: Sequence[MeasuredCell]) -> Section | None:
    loads = bands(PAPER_QPS)
    if not all((topology, x) in {(c.topology, c.x) for c in cells} for topology in PRINTED_GAINS for x in (0.0, 1.0)):
        return None
    rows = [
        (
            topology,
            band.label,
            signed(figure, 1) + " %",
            *(signed_percent(each.of(cells, topology, band.qps)) for each in readings.GAIN_READINGS),
        )
        for topology, figures in PRINTED_GAINS.items()
        for band, figure in zip(loads, figures, strict=True)
    ]
    table = Table(
        caption=(
            "Change of turn-2 TTFT from x=0 to x=1 as the paper prints it in table 1, and by five readings of the "
            "published rows. Own means: each arm's mean over its own runs. Pairs: over workloads and loads where both "
            "arms are evidence. The last column is what a sweep's report shows."
        ),
        head=("topology", "conversations/s", "printed", *(each.name for each in readings.GAIN_READINGS)),
        rows=rows,
        labels=2,
    )
    return Section("paper-table-1", "The paper's table 1, side by side", (table, *_about_table_1(cells, loads)))


def _about_table_1(cells: Sequence[MeasuredCell], loads: Sequence[Band]) -> list[Text]:
    found = {each.name: readings.gain_matches(cells, each, loads) for each in readings.GAIN_READINGS}
    best = max(found, key=lambda name: found[name])
    total = sum(map(len, PRINTED_GAINS.values()))
    missed = [
        band
        for column, band in enumerate(loads)
        if not any(
            readings.matches(readings.OWN_WHOLE.of(cells, topology, band.qps), figures[column])
            for topology, figures in PRINTED_GAINS.items()
        )
    ]
    texts = [
        Text(
            f"The reading “{best}” gives {found[best]} of the {total} printed figures to the digit; the others give "
            f"{', '.join(str(number) for name, number in found.items() if name != best)}."
        )
    ]
    for band in missed:
        points, off = readings.closest_loads(cells, loads.index(band))
        texts.append(
            Text(
                f"The column {band.label} could not be found: no set of loads gives it. The nearest of all, "
                f"{', '.join(f'{point:g}' for point in points)}, is off by up to {off:.1f} percent points."
            )
        )
    low, high = (readings.TYPICAL.of(cells, "3P_1D", band.qps) for band in (loads[0], loads[-1]))
    texts.append(
        Text(
            "Own means compare different work: the workloads that x=0 lost are missing from its mean and present "
            "in that of x=1. Over pairs, the gain of 3P_1D does not shrink with load as the paper's column "
            f"suggests: it is {signed_percent(low)} at low load and {signed_percent(high)} at high load. "
            "A sweep's report uses pairs for that reason."
        )
    )
    return texts


def _table_2(cells: Sequence[MeasuredCell]) -> Section | None:
    found = [each for objective in OBJECTIVES if (each := wins(cells, objective)) is not None]
    if len(found) < len(OBJECTIVES):
        return None
    here = modes(cells)
    rows = [
        (mode, *(text for column, each in enumerate(found) for text in _pair(mode, column, each, mode in here)))
        for mode in MODES
    ]
    rows.append(("all", *(text for column in range(len(found)) for text in (_sum(column), "100.0 %"))))
    head = ("mode", *(text for each in found for text in (f"{each.objective}, printed", f"{each.objective}, here")))
    table = Table(
        caption=(
            f"Share of the {found[0].points} points that each mode wins, as the paper prints it in table 2 (hybrids: "
            "its appendix A), and by the code of the section “Which mode wins” from the published rows."
        ),
        head=head,
        rows=rows,
    )
    blocks = (table, Text(_about_table_2(cells, found)), _ttft_readings(cells), Text(_about_disagreement(cells)))
    return Section("paper-table-2", "The paper's table 2, side by side", blocks)


def _pair(mode: str, column: int, found: Wins, is_here: bool) -> tuple[str, str]:
    return f"{PRINTED_WINS[mode][column]:.1f} %", percent(found.share(mode)) if is_here else NONE


def _sum(column: int) -> str:
    return f"{sum(shares[column] for shares in PRINTED_WINS.values()):.1f} %"


def _about_table_2(cells: Sequence[MeasuredCell], found: Sequence[Wins]) -> str:
    absent = [mode for mode in MODES if mode not in modes(cells)]
    here = modes(cells)
    fits = all(readings.can_be_printed(each, column, here) for column, each in enumerate(found))
    printed_sum = sum(shares[2] for shares in PRINTED_WINS.values())
    words = [
        f"These rows hold {len(arms(cells))} of the paper's 17 configurations; none of the modes {', '.join(absent)}."
        if absent
        else "These rows hold every mode.",
        "What the missing ones won falls to those that are left, so a share here must be at least the printed one: "
        + ("it is, in every column." if fits else "it is not in every column, so the readings differ."),
        f"The printed throughput column, hybrids included, sums to {printed_sum:.1f} %: the paper does not say who won "
        "the remaining points.",
        f"Shared points here: {', '.join(f'{each.ties} for {each.objective}' for each in found)}; published figures "
        "are rounded to 0.01 ms. A run that failed is no evidence and wins nothing: its zeros, taken as figures, would "
        "win every TTFT and TPOT.",
    ]
    return " ".join(words)


def _ttft_readings(cells: Sequence[MeasuredCell]) -> Table:
    here = modes(cells)
    rows = []
    for reading in readings.WIN_READINGS:
        found = readings.wins_of(cells, reading)
        if found is not None:
            fits = "possible" if readings.can_be_printed(found, 0, here) else "excluded: below a printed share"
            rows.append((reading.name, *(percent(found.share(mode)) for mode in here), fits))
    return Table(
        caption=(
            "TTFT winners by other readings. A reading under which a mode wins less than the paper prints, although "
            "fewer compete, cannot be the paper's, if its rows were these."
        ),
        head=("reading", *here, "as the paper's reading"),
        rows=rows,
        words=(len(here) + 1,),
    )


def _about_disagreement(cells: Sequence[MeasuredCell]) -> str:
    differ, points = disagreement(cells, TTFT, TPOT)
    return (
        f"The best configuration for TTFT is not the best for TPOT at {differ} of {points} points "
        f"({percent(differ / points)}); the paper prints {PRINTED_DISAGREEMENT} % for all its configurations."
    )


def _table_4(cells: Sequence[MeasuredCell]) -> Section | None:
    rates = {(rate.arm.topology, rate.arm.x, rate.qps): rate for rate in failure_rates(cells)}
    known = {(cell.topology, cell.x): Arm.of(cell).label for cell in cells}
    rows = []
    for key, figures in PRINTED_FAILURES.items():
        if key not in known:
            continue
        texts = []
        for qps, figure in zip(PRINTED_FAILURE_QPS, figures, strict=True):
            rate = rates.get((*key, qps))
            texts += [f"{figure} %", NONE if rate is None else percent(rate.lost / rate.workloads, 0)]
        rows.append((known[key], *texts))
    if not rows:
        return None
    head = (
        "arm",
        *(text for qps in PRINTED_FAILURE_QPS for text in (f"at {qps:g}, printed", f"at {qps:g}, here")),
    )
    table = Table(
        caption=(
            "The paper's table 4 by conversations/s, beside the share of workloads that are no evidence in the "
            "published rows: their run failed, or more than 5 % of its requests or follow-up turns did."
        ),
        head=head,
        rows=rows,
    )
    return Section("paper-table-4", "The paper's table 4, side by side", (table, Text(_ABOUT_TABLE_4)))


_ABOUT_TABLE_4 = (
    "Every printed rate is a whole number of eighteenths, so it counts workloads, of which there are 18 at each load, "
    "and not requests, although the paper's text speaks of requests that took more than 30 s. The published rows do "
    "not give it: no workload of 3P_1D at x=1 is lost in them at any load, and of those that 3P_1D loses at x=0, five "
    "fail at every load from 0.5 conversations/s on. No single bound on a recorded TTFT or on the duration of a run "
    "gives the printed numbers either, so they come from other runs than those that were published, or from a rule "
    "that the paper does not state."
)
