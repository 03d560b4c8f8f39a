"""The lookup `interpolated`: what a table says between its cells, and on what evidence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.config import Lookup
from ppd.proxy.decision_table.format import Axes, Cell, ContextClass, WorkloadType
from ppd.proxy.decision_table.nearest import Around
from ppd.proxy.decision_table.score import CellKey, Evidence, Verdict, Weights, differences
from ppd.proxy.decision_table.table import KIND, VERSION, DecisionTable, TableQuery, bundled
from tests.proxy.decision_table.made_up import ORIGIN, arm

BETWEEN = Lookup.INTERPOLATED
AXES = Axes(
    contexts=(
        ContextClass(name="small", max_tokens=500, measured_tokens=100),
        ContextClass(name="large", max_tokens=3200, measured_tokens=1600),
    ),
    workloads=(
        WorkloadType(name="chat", new_tokens=64, output_tokens=64),
        WorkloadType(name="paste", new_tokens=1024, output_tokens=64),
        WorkloadType(name="story", new_tokens=64, output_tokens=1024),
    ),
    qps=(1.0, 4.0),
    qps_counts="conversations",
)
TABLES = {name: DecisionTable.load(path) for name, path in bundled().items()}
SCORED = {name: table.scored(Weights(), BETWEEN) for name, table in TABLES.items()}


def table(local: dict[tuple[str, str, float], tuple[float, float]]) -> DecisionTable:
    """Cells whose local arm's TTFT and TPOT are these multiples of split's 0.1 s and 0.01 s; the others are failed."""
    cells = tuple(
        Cell(context=c, workload=w, qps=q, split=arm(0.1, 0.01), local=arm(0.1 * ttft, 0.01 * tpot))
        for (c, w, q), (ttft, tpot) in local.items()
    )
    return DecisionTable(
        version=VERSION, kind=KIND, name="t", topology="1P_1D", provenance=ORIGIN, axes=AXES, cells=cells
    )


ALL = [(c.name, w.name, q) for c in AXES.contexts for w in AXES.workloads for q in AXES.qps]
EVEN = dict.fromkeys(ALL, (0.5, 1.1))


@pytest.mark.parametrize("name", sorted(TABLES))
def test_on_a_measured_point_both_lookups_give_the_cells_own_verdict(name: str) -> None:
    axes, nearest = TABLES[name].axes, TABLES[name].scored(Weights())
    for context in axes.contexts:
        for kind in axes.workloads:
            for qps in axes.qps:
                workload = TableQuery(kind.new_tokens, context.measured_tokens, kind.output_tokens, qps)
                assert SCORED[name].lookup(workload) == nearest.lookup(workload)


@pytest.mark.parametrize(
    ("changed", "workload", "d_ttft", "d_tpot"),
    [
        # Half way between by ratio: the geometric mean of 0.5 and 0.125 is 0.25, that of 1.1 and 1.21 about 1.154.
        (("small", "chat", 4.0), TableQuery(64, 100, 64, 2.0), 0.75, 1.331**0.5 - 1),
        (("large", "chat", 1.0), TableQuery(64, 400, 64, 1.0), 0.75, 1.331**0.5 - 1),
        (("small", "paste", 1.0), TableQuery(256, 100, 64, 1.0), 0.75, 1.331**0.5 - 1),
        (("small", "story", 1.0), TableQuery(64, 100, 256, 1.0), 0.75, 1.331**0.5 - 1),
        # A quarter of the way: 0.5 * (0.125 / 0.5) ** 0.25.
        (("small", "chat", 4.0), TableQuery(64, 100, 64, 2.0**0.5), 1 - 0.5 * 0.25**0.25, 1.1**1.25 - 1),
        # In the middle of four cells that one of them differs from.
        (("large", "chat", 4.0), TableQuery(64, 400, 64, 2.0), 1 - 0.5 * 0.25**0.25, 1.1**1.25 - 1),
        # In the triangle, with shares 1/2, 1/4, 1/4.
        (("small", "chat", 1.0), TableQuery(128, 100, 128, 1.0), 1 - 0.5 * 0.25**0.5, 1.1**1.5 - 1),
    ],
)
def test_between_cells_the_logarithms_are_averaged(
    changed: tuple[str, str, float], workload: TableQuery, d_ttft: float, d_tpot: float
) -> None:
    verdict = table(EVEN | {changed: (0.125, 1.21)}).lookup(workload, Weights(1, 2), BETWEEN)
    assert verdict.d_ttft == pytest.approx(d_ttft)
    assert verdict.d_tpot == pytest.approx(d_tpot)
    assert verdict.score == pytest.approx(d_ttft - 2 * d_tpot)
    assert verdict.evidence is Evidence.INTERPOLATED


@pytest.mark.parametrize(
    ("workload", "evidence"),
    [
        (TableQuery(64, 100, 64, 1.0), Evidence.INSIDE),
        (TableQuery(64, 1600, 64, 4.0), Evidence.INSIDE),
        (TableQuery(64, 100, 64, 1.1), Evidence.INTERPOLATED),
        (TableQuery(64, 101, 64, 1.0), Evidence.INTERPOLATED),
        (TableQuery(65, 100, 64, 1.0), Evidence.INTERPOLATED),
        (TableQuery(256, 400, 256, 2.0), Evidence.INTERPOLATED),
        (TableQuery(64, 99, 64, 1.0), Evidence.EXTRAPOLATED),
        (TableQuery(64, 1601, 64, 1.0), Evidence.EXTRAPOLATED),  # in the class, beyond what was measured in it
        (TableQuery(64, 100, 64, 0.9), Evidence.EXTRAPOLATED),
        (TableQuery(64, 100, 64, 4.1), Evidence.EXTRAPOLATED),
        (TableQuery(63, 100, 64, 1.0), Evidence.EXTRAPOLATED),
        (TableQuery(1024, 100, 1024, 2.0), Evidence.EXTRAPOLATED),  # each in its range, but no measured type beyond
        (TableQuery(0, 0, 0, 0.0), Evidence.EXTRAPOLATED),
    ],
)
def test_the_evidence_says_where_the_turn_lies(workload: TableQuery, evidence: Evidence) -> None:
    assert table(EVEN).lookup(workload, Weights(), BETWEEN).evidence is evidence


@pytest.mark.parametrize(
    ("beyond", "end"),
    [
        (TableQuery(64, 9, 64, 2.0), TableQuery(64, 100, 64, 2.0)),
        (TableQuery(64, 99_999, 64, 2.0), TableQuery(64, 1600, 64, 2.0)),
        (TableQuery(64, 400, 64, 0.01), TableQuery(64, 400, 64, 1.0)),
        (TableQuery(64, 400, 64, 40.0), TableQuery(64, 400, 64, 4.0)),
        (TableQuery(8, 400, 8, 2.0), TableQuery(64, 400, 64, 2.0)),
        (TableQuery(1024, 400, 1024, 2.0), TableQuery(256, 400, 256, 2.0)),
        (TableQuery(256, 400, 32, 2.0), TableQuery(256, 400, 64, 2.0)),
    ],
)
def test_beyond_an_axis_the_nearest_place_on_it_answers(beyond: TableQuery, end: TableQuery) -> None:
    factors = {key: (0.3 + 0.05 * number, 1.0 + 0.02 * number) for number, key in enumerate(ALL)}
    scored = table(factors).scored(Weights(), BETWEEN)
    found, expected = scored.lookup(beyond), scored.lookup(end)
    assert found.evidence is Evidence.EXTRAPOLATED
    assert found.d_ttft == pytest.approx(expected.d_ttft)
    assert found.d_tpot == pytest.approx(expected.d_tpot)
    assert found.cell == expected.cell


@pytest.mark.parametrize(
    ("missing", "workload", "expected"),
    [
        # Between a cell and a failed one nothing is interpolated: the nearest cell answers, and says so.
        (
            [("small", "chat", 4.0)],
            TableQuery(64, 100, 64, 1.1),
            (CellKey("small", "chat", 1.0), Evidence.EXTRAPOLATED),
        ),
        (
            [("small", "chat", 4.0)],
            TableQuery(64, 100, 64, 2.4),
            (CellKey("small", "chat", 1.0), Evidence.EXTRAPOLATED),
        ),
        ([("small", "chat", 4.0)], TableQuery(64, 100, 64, 2.6), (CellKey("small", "chat", 4.0), Evidence.NONE)),
        ([("small", "chat", 4.0)], TableQuery(64, 90, 64, 1.9), (CellKey("small", "chat", 1.0), Evidence.EXTRAPOLATED)),
        # One of four cells is enough for that.
        (
            [("large", "chat", 4.0)],
            TableQuery(64, 399, 64, 1.99),
            (CellKey("small", "chat", 1.0), Evidence.EXTRAPOLATED),
        ),
        # On a measured point, and where a failed cell has no share, it is not asked.
        ([("small", "chat", 4.0)], TableQuery(64, 100, 64, 1.0), (CellKey("small", "chat", 1.0), Evidence.INSIDE)),
        (
            [("small", "story", 1.0)],
            TableQuery(256, 100, 64, 1.0),
            (CellKey("small", "chat", 1.0), Evidence.INTERPOLATED),
        ),
    ],
)
def test_beside_a_cell_without_evidence_the_nearest_one_answers(
    missing: list[tuple[str, str, float]], workload: TableQuery, expected: tuple[CellKey, Evidence]
) -> None:
    factors = {key: factor for key, factor in EVEN.items() if key not in missing}
    asked = table(factors)
    verdict = asked.lookup(workload, Weights(), BETWEEN)
    assert (verdict.cell, verdict.evidence) == expected
    assert (verdict.local is None) is (verdict.evidence is Evidence.NONE)
    if verdict.evidence is not Evidence.INTERPOLATED:
        assert verdict.d_ttft == asked.lookup(workload, Weights()).d_ttft


def test_a_table_of_one_cell_answers_everything_with_it() -> None:
    axes = Axes(contexts=AXES.contexts[:1], workloads=AXES.workloads[:1], qps=(1.0,), qps_counts="turns")
    only = DecisionTable(
        version=VERSION,
        kind=KIND,
        name="t",
        topology="1P_1D",
        provenance=ORIGIN,
        axes=axes,
        cells=(Cell(context="small", workload="chat", qps=1.0, split=arm(0.1, 0.01), local=arm(0.05, 0.01)),),
    )
    scored = only.scored(Weights(), BETWEEN)
    assert scored.lookup(TableQuery(64, 100, 64, 1.0)).evidence is Evidence.INSIDE
    far = scored.lookup(TableQuery(5000, 5, 5, 50.0))
    assert (far.evidence, far.d_ttft) == (Evidence.EXTRAPOLATED, 0.5)


NAME = st.sampled_from(sorted(TABLES))
TOKENS = st.integers(min_value=0) | st.integers(0, 8192)
RATES = st.floats(min_value=0, allow_infinity=False, allow_nan=False) | st.floats(0, 25)
ANYTHING = st.builds(TableQuery, TOKENS, TOKENS, TOKENS, RATES)
USUAL = st.builds(TableQuery, st.integers(8, 2048), st.integers(64, 4096), st.integers(16, 2048), st.floats(0.4, 25))
WEIGHTS = st.tuples(st.floats(0, 10), st.floats(0, 10)).filter(any).map(lambda both: Weights(*both))


@given(NAME, ANYTHING)
def test_every_turn_finds_a_verdict(name: str, workload: TableQuery) -> None:
    axes, verdict = TABLES[name].axes, SCORED[name].lookup(workload)
    assert verdict.cell.context in {context.name for context in axes.contexts}
    assert verdict.cell.workload in {kind.name for kind in axes.workloads}
    assert verdict.cell.qps in axes.qps
    assert (verdict.local is None) == (verdict.evidence is Evidence.NONE) == (verdict.score is None)


def around(name: str, workload: TableQuery) -> list[tuple[float, float] | None]:
    """The differences of the cells around a turn; None for one without evidence."""
    axes = TABLES[name].axes
    keys = [(c.name, w.name, q) for c in axes.contexts for w in axes.workloads for q in axes.qps]
    cells = {(cell.context, cell.workload, cell.qps): cell for cell in TABLES[name].cells}
    return [differences(cells.get(keys[number])) for number, _ in Around(axes).mix(workload).shares]


@given(NAME, USUAL)
def test_a_value_lies_between_those_of_the_cells_around_or_is_the_nearest_cells(
    name: str, workload: TableQuery
) -> None:
    verdict, cells = SCORED[name].lookup(workload), around(name, workload)
    measured = [pair for pair in cells if pair is not None]
    if len(measured) < len(cells):
        nearest = TABLES[name].lookup(workload, Weights())
        assert (verdict.cell, verdict.d_ttft, verdict.d_tpot) == (nearest.cell, nearest.d_ttft, nearest.d_tpot)
        assert verdict.evidence in (Evidence.EXTRAPOLATED, Evidence.NONE)
        return
    assert verdict.d_ttft is not None and verdict.d_tpot is not None
    ttft, tpot = zip(*measured, strict=True)
    assert min(ttft) - 1e-9 <= verdict.d_ttft <= max(ttft) + 1e-9
    assert min(tpot) - 1e-9 <= verdict.d_tpot <= max(tpot) + 1e-9


@given(NAME, USUAL, WEIGHTS)
def test_a_decision_is_what_the_weights_make_of_the_differences(
    name: str, workload: TableQuery, weights: Weights
) -> None:
    unweighted = SCORED[name].lookup(workload)
    verdict = TABLES[name].lookup(workload, weights, BETWEEN)
    assert (verdict.d_ttft, verdict.d_tpot) == (unweighted.d_ttft, unweighted.d_tpot)
    if verdict.d_ttft is None or verdict.d_tpot is None:
        assert verdict.local is None
        return
    assert verdict.score == weights.score(verdict.d_ttft, verdict.d_tpot)
    assert verdict.local is (weights.ttft * verdict.d_ttft > weights.tpot * verdict.d_tpot)


MILLION = 10**6  # tokens by the million, so that one token is a small step
WIDE = DecisionTable(
    version=VERSION,
    kind=KIND,
    name="wide",
    topology="1P_1D",
    provenance=ORIGIN,
    axes=Axes(
        contexts=tuple(
            ContextClass(name=c.name, max_tokens=c.max_tokens * MILLION, measured_tokens=c.measured_tokens * MILLION)
            for c in AXES.contexts
        ),
        workloads=tuple(
            WorkloadType(name=w.name, new_tokens=w.new_tokens * MILLION, output_tokens=w.output_tokens * MILLION)
            for w in AXES.workloads
        ),
        qps=AXES.qps,
        qps_counts="conversations",
    ),
    cells=table({key: (0.2 + 0.06 * number, 1.0 + 0.03 * number) for number, key in enumerate(ALL)}).cells,
)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ((256, 400, 128, 1.0 - 1e-9), (256, 400, 128, 1.0 + 1e-9)),
        ((256, 400, 128, 2.5 - 1e-9), (256, 400, 128, 2.5 + 1e-9)),  # where the nearest QPS changes
        ((256, 400, 128, 4.0 - 1e-9), (256, 400, 128, 4.0 + 1e-9)),
        ((256, 100 - 1e-6, 128, 2.0), (256, 100 + 1e-6, 128, 2.0)),
        ((256, 500 - 1e-6, 128, 2.0), (256, 500 + 1e-6, 128, 2.0)),  # where the class changes
        ((256, 1600 - 1e-6, 128, 2.0), (256, 1600 + 1e-6, 128, 2.0)),
        ((64 - 1e-6, 400, 64, 2.0), (64 + 1e-6, 400, 64, 2.0)),  # over a measured type
        ((256 - 1e-6, 400, 64, 2.0), (256 + 1e-6, 400, 64, 2.0)),  # where the nearest type changes
        ((256, 400, 256 - 1e-6, 2.0), (256, 400, 256 + 1e-6, 2.0)),  # over the border of the types
        ((1024, 400, 64 - 1e-6, 2.0), (1024, 400, 64 + 1e-6, 2.0)),
        ((500, 400, 700 - 1e-6, 2.0), (500, 400, 700 + 1e-6, 2.0)),  # beyond it
    ],
)
def test_nowhere_a_small_step_is_a_jump(
    low: tuple[float, float, float, float], high: tuple[float, float, float, float]
) -> None:
    scored = WIDE.scored(Weights(), BETWEEN)

    def lookup(new: float, cached: float, output: float, qps: float) -> Verdict:
        return scored.lookup(TableQuery(round(new * MILLION), round(cached * MILLION), round(output * MILLION), qps))

    before, after = lookup(*low), lookup(*high)
    assert before.d_ttft == pytest.approx(after.d_ttft, abs=1e-6)
    assert before.d_tpot == pytest.approx(after.d_tpot, abs=1e-6)
