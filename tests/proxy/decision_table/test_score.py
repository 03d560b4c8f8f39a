from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ppd.proxy.decision_table.format import (
    Arm,
    Axes,
    Cell,
    ContextClass,
    FailedArms,
    Tpot,
    Ttft,
    WorkloadType,
)
from ppd.proxy.decision_table.score import CellKey, Evidence, Verdict, Weights
from ppd.proxy.decision_table.table import KIND, VERSION, DecisionTable, ScoredTable, TableQuery, bundled, find
from ppd.proxy.errors import ConfigError, FormatError
from tests.proxy.decision_table.made_up import ORIGIN, arm

CONTEXTS = (
    ContextClass(name="small", max_tokens=512, measured_tokens=256),
    ContextClass(name="large", max_tokens=4096, measured_tokens=2048),
)
WORKLOADS = (
    WorkloadType(name="chat", new_tokens=64, output_tokens=64),
    WorkloadType(name="paste", new_tokens=1024, output_tokens=32),
)
QPS = (1.0, 2.0, 4.0)
TABLES = {name: DecisionTable.load(path) for name, path in bundled().items()}


def cell(workload: str, qps: float, split: Arm | None, local: Arm | None, failed: FailedArms | None = None) -> Cell:
    return Cell(context="small", workload=workload, qps=qps, split=split, local=local, failed=failed)


def table(*cells: Cell) -> DecisionTable:
    axes = Axes(contexts=CONTEXTS, workloads=WORKLOADS, qps=QPS, qps_counts="turns")
    return DecisionTable(
        version=VERSION, kind=KIND, name="t", topology="1P_1D", provenance=ORIGIN, axes=axes, cells=cells
    )


def centre(name: str) -> TableQuery:
    kind = next(workload for workload in WORKLOADS if workload.name == name)
    return TableQuery(kind.new_tokens, 256, kind.output_tokens, 2.0)


SAMPLE = table(
    cell("chat", 2.0, arm(0.200, 0.010), arm(0.100, 0.012)),
    cell("paste", 2.0, None, arm(0.100, 0.012, failures=3), FailedArms(split="it crashed")),
)


def test_a_table_survives_its_own_encoding() -> None:
    assert DecisionTable.decode(SAMPLE.encode()) == SAMPLE


def test_what_was_not_recorded_is_null_and_survives_too() -> None:
    means = Arm(
        n=None,
        failures=None,
        ttft_s=Ttft(mean=0.1, p50=None, p99=None, std=None),
        tpot_s=Tpot(mean=0.01, p50=None, p99=None, std=None),
    )
    known = Arm(
        n=20,
        failures=0,
        ttft_s=Ttft(mean=0.1, p50=0.09, p99=0.3, std=0.02, half_width=0.004),
        tpot_s=Tpot(mean=0.01, p50=0.01, p99=0.02, std=0.0, half_width=0.0),
    )
    mixed = table(cell("chat", 2.0, means, known))
    assert DecisionTable.decode(mixed.encode()) == mixed
    assert b'"half_width":0.004' in mixed.encode()
    assert mixed.encode().count(b'"half_width"') == 2, "absent where it was not recorded"
    assert mixed.lookup(centre("chat"), Weights()).local is False


def test_each_cell_has_a_line_of_its_own() -> None:
    lines = SAMPLE.encode().decode().splitlines()
    assert [line.strip()[:35] for line in lines if '"workload"' in line] == [
        '{"context":"small","workload":"chat",'[:35],
        '{"context":"small","workload":"paste",'[:35],
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"version": 1', b'"version": 2', r"version: must be 1, got 2"),
        (b'"version": 1,', b"", r"missing required field `version`"),
        (b'"kind": "ppd-decision-table"', b'"kind": "ppd-grid"', r"kind: must be 'ppd-decision-table', got 'ppd-grid'"),
        (b'"gpu": "GPU",', b"", r"missing required field `gpu` - at `\$.provenance`"),
        (b'"gpu": ', b'"cpu": "", "gpu": ', r"unknown field `cpu` - at `\$.provenance`"),
        (b'"n":10', b'"n":0', r">= 1 - at `\$.cells\[0\].split.n`"),
        (b'"mean":0.2', b'"mean":0', r"> 0.0 - at `\$.cells\[0\].split.ttft_s.mean`"),
        (b'"mean":0.2', b'"mean":1e999', r"out of range - at `\$.cells\[0\].split.ttft_s.mean`"),
        (b'"p99":0.4', b'"p99":0', r"> 0.0 - at `\$.cells\[0\].split.ttft_s.p99`"),
        (b'"std":0.0', b'"std":0.0,"half_width":-1', r">= 0.0 - at `\$.cells\[0\].split.ttft_s.half_width`"),
        (b'"n":10,', b"", r"missing required field `n` - at `\$.cells\[0\].split`"),
        (b'"mean":0.2', b'"mean":null', r"got `null` - at `\$.cells\[0\].split.ttft_s.mean`"),
        (b'"workload":"chat"', b'"workload":"chatt"', r"cells\[0\].workload: 'chatt' is not on its axis"),
        (b'"context":"small"', b'"context":"huge"', r"cells\[0\].context: 'huge' is not on its axis"),
        (b'"qps":2.0', b'"qps":3', r"cells\[0\].qps: 3.0 is not on its axis"),
        (b'"workload":"paste"', b'"workload":"chat"', r"cells: .*chat.* occurs twice"),
        (b'"qps": [1.0, 2.0, 4.0]', b'"qps": [2.0, 1.0]', r"axes.qps: must be in increasing order"),
        (b'"qps": [1.0, 2.0, 4.0]', b'"qps": []', r"axes.qps: must not be empty"),
        (b'"qps_counts": "turns"', b'"qps_counts": "requests"', r"'requests' - at `\$.axes.qps_counts`"),
        (b'"max_tokens":4096', b'"max_tokens":512', r"axes.contexts: max_tokens: must be in increasing order"),
        (b'"measured_tokens":2048', b'"measured_tokens":512', r"measured_tokens of 'large' must be in 513..4096"),
        (b'"new_tokens":1024,"output_tokens":32', b'"new_tokens":64,"output_tokens":64', r"centre: .* occurs twice"),
        (b'{"name":"large"', b'{"name":"small"', r"axes.contexts: name: small occurs twice"),
        (b'"failed":{"split"', b'"failed":{"local"', r"cells\[1\].failed.local: the arm has measurements"),
        (b'"name": "t"', b'"name": "\xff"', r"decision table: "),
        (b"{", b"[", r"decision table: "),
        (b"{", b'{"more":' + b"[" * 5000 + b"]" * 5000 + b",", r"decision table: "),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_field(old: bytes, new: bytes, message: str) -> None:
    data = SAMPLE.encode()
    assert old in data
    with pytest.raises(FormatError, match=message):
        DecisionTable.decode(data.replace(old, new, 1))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"absent.json: No such file"):
        DecisionTable.load(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(FormatError, match=r"bad.json: decision table: .*version"):
        DecisionTable.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("weights", "score", "local"),
    [
        (Weights(1, 1), 0.5 - 0.2, True),
        (Weights(1, 3), 0.5 - 0.6, False),
        (Weights(0, 1), -0.2, False),
        (Weights(2, 0), 1.0, True),
    ],
)
def test_the_score_is_weighted_ttft_saved_less_weighted_tpot_added(weights: Weights, score: float, local: bool) -> None:
    verdict = SAMPLE.lookup(centre("chat"), weights)
    assert verdict.d_ttft == pytest.approx(0.5)
    assert verdict.d_tpot == pytest.approx(0.2)
    assert verdict.score == pytest.approx(score)
    assert verdict.local is local
    assert verdict.evidence is Evidence.INSIDE


def test_a_score_of_zero_is_split() -> None:
    same = table(cell("chat", 2.0, arm(0.1, 0.01), arm(0.1, 0.01)))
    assert same.lookup(centre("chat"), Weights()).local is False


@pytest.mark.parametrize("value", [-1.0, -0.001, math.inf, math.nan])
@pytest.mark.parametrize("key", ["ttft", "tpot"])
def test_weights_are_finite_and_not_negative(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"w_{key}: must be a finite number of at least 0") as caught:
        Weights(**{key: value})
    assert caught.value.param == f"w_{key}"


def test_one_weight_is_above_0() -> None:
    with pytest.raises(ConfigError, match="w_ttft = 0: must be above 0 where w_tpot is 0"):
        Weights(0, 0)


@pytest.mark.parametrize(
    ("workload", "qps"),
    [("paste", 2.0), ("chat", 1.0)],
    ids=["an arm failed", "nothing was measured"],
)
def test_a_cell_without_both_arms_is_no_evidence(workload: str, qps: float) -> None:
    kind = centre(workload)
    verdict = SAMPLE.lookup(TableQuery(kind.new_tokens, 256, kind.output_tokens, qps), Weights())
    assert verdict == Verdict(None, None, None, None, CellKey("small", workload, qps), Evidence.NONE)


@pytest.mark.parametrize(
    ("cached", "qps", "context", "point"),
    [
        (1, 1.0, "small", 1.0),
        (512, 1.4, "small", 1.0),
        (513, 1.5, "large", 2.0),
        (4096, 2.9, "large", 2.0),
        (4097, 3.0, "large", 4.0),
        (10**9, 1e9, "large", 4.0),
        (0, 0.0, "small", 1.0),
    ],
)
def test_context_goes_by_bounds_and_qps_to_the_nearest_point_upwards(
    cached: int, qps: float, context: str, point: float
) -> None:
    assert SAMPLE.lookup(TableQuery(64, cached, 64, qps), Weights()).cell == CellKey(context, "chat", point)


@pytest.mark.parametrize(
    ("workload", "evidence"),
    [
        (TableQuery(64, 256, 64, 2.0), Evidence.INSIDE),
        (TableQuery(63, 256, 64, 2.0), Evidence.EXTRAPOLATED),
        (TableQuery(64, 256, 65, 2.0), Evidence.EXTRAPOLATED),
        (TableQuery(64, 0, 64, 2.0), Evidence.EXTRAPOLATED),
        (TableQuery(64, 4097, 64, 2.0), Evidence.NONE),
        (TableQuery(64, 256, 64, 4.1), Evidence.NONE),
        (TableQuery(1025, 256, 32, 2.0), Evidence.NONE),
    ],
)
def test_a_turn_beyond_an_axis_is_extrapolated_and_a_failed_cell_stays_no_evidence(
    workload: TableQuery, evidence: Evidence
) -> None:
    assert SAMPLE.lookup(workload, Weights()).evidence is evidence


def test_above_the_last_context_class_its_cells_are_used_as_extrapolated() -> None:
    scored = TABLES["h100-llama-3.1-8b-2P_2D"].scored(Weights())
    inside, above = scored.lookup(TableQuery(64, 4096, 64, 2.0)), scored.lookup(TableQuery(64, 100_000, 64, 2.0))
    assert (inside.cell, inside.evidence) == (CellKey("large", "small_bal", 2.0), Evidence.INSIDE)
    assert (above.cell, above.evidence) == (inside.cell, Evidence.EXTRAPOLATED)
    assert above.score == inside.score


@pytest.mark.parametrize("name", sorted(TABLES))
def test_the_centre_of_every_cell_finds_that_cell(name: str) -> None:
    axes, scored = TABLES[name].axes, TABLES[name].scored(Weights())
    found = [
        scored.lookup(TableQuery(workload.new_tokens, context.measured_tokens, workload.output_tokens, qps))
        for context in axes.contexts
        for workload in axes.workloads
        for qps in axes.qps
    ]
    assert len({verdict.cell for verdict in found}) == 180
    assert found == list(scored.verdicts())


@pytest.mark.parametrize(
    ("new", "output", "name"),
    [
        (1, 1, "tiny"),
        (20, 40, "tiny"),
        (40, 200, "short_gen"),
        (30, 2000, "very_long_gen"),
        (150, 150, "mid_bal"),
        (300, 80, "mid_paste"),
        (5000, 300, "huge_paste"),
    ],
)
def test_other_turns_find_the_workload_nearest_by_ratio(new: int, output: int, name: str) -> None:
    scored = TABLES["h100-llama-3.1-8b-2P_2D"].scored(Weights())
    assert scored.lookup(TableQuery(new, 256, output, 2.0)).cell.workload == name


SHIPPED = TABLES["h100-llama-3.1-8b-2P_2D"].scored(Weights())


@given(new=st.integers(0, 1 << 14), output=st.integers(0, 1 << 13))
def test_of_all_workloads_the_nearest_is_found(new: int, output: int) -> None:
    def distance2(kind: WorkloadType) -> float:
        by_new = math.log2(kind.new_tokens) - math.log2(max(new, 1))
        return by_new**2 + (math.log2(kind.output_tokens) - math.log2(max(output, 1))) ** 2

    nearest = min(SHIPPED.table.axes.workloads, key=distance2)
    assert SHIPPED.lookup(TableQuery(new, 256, output, 2.0)).cell.workload == nearest.name


@pytest.mark.parametrize(
    ("name", "w_tpot", "local", "split", "none"),
    [
        ("1P_3D", 1, 148, 2, 30),
        ("2P_2D", 1, 178, 2, 0),
        ("3P_1D", 1, 114, 1, 65),
        ("1P_3D", 6, 144, 6, 30),
        ("2P_2D", 6, 162, 18, 0),
        ("3P_1D", 6, 98, 17, 65),
    ],
)
def test_the_shipped_tables_decide_as_published_where_there_is_evidence(
    name: str, w_tpot: float, local: int, split: int, none: int
) -> None:
    verdicts = TABLES[f"h100-llama-3.1-8b-{name}"].scored(Weights(1, w_tpot)).verdicts()
    decisions = [verdict.local for verdict in verdicts]
    assert [decisions.count(value) for value in (True, False, None)] == [local, split, none]


def test_a_table_is_found_by_name_and_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(SAMPLE.encode())
    assert find(str(path)) == path
    assert find("h100-llama-3.1-8b-1P_3D") == bundled()["h100-llama-3.1-8b-1P_3D"]


def test_an_unknown_name_lists_the_known_ones() -> None:
    known = "h100-llama-3.1-8b-1P_3D, h100-llama-3.1-8b-2P_2D, h100-llama-3.1-8b-3P_1D"
    with pytest.raises(ConfigError, match=f"table = 'h100': must be {known}"):
        find("h100")


TABLE_NAMES = st.sampled_from(sorted(TABLES))
TOKENS = st.integers(min_value=0) | st.integers(0, 8192)
RATES = st.floats(min_value=0, allow_infinity=False, allow_nan=False) | st.floats(0, 25)
WORKLOAD = st.builds(TableQuery, TOKENS, TOKENS, TOKENS, RATES)
WEIGHT = st.floats(min_value=0, allow_infinity=False, allow_nan=False) | st.floats(0, 10)
SCORED = {name: ScoredTable(loaded, Weights()) for name, loaded in TABLES.items()}


@given(TABLE_NAMES, WORKLOAD)
def test_every_turn_finds_a_cell_on_the_axes(name: str, workload: TableQuery) -> None:
    axes, verdict = TABLES[name].axes, SCORED[name].lookup(workload)
    assert verdict.cell.context in {context.name for context in axes.contexts}
    assert verdict.cell.workload in {kind.name for kind in axes.workloads}
    assert verdict.cell.qps in axes.qps
    assert (verdict.local is None) == (verdict.evidence is Evidence.NONE) == (verdict.score is None)


@given(TABLE_NAMES, WORKLOAD)
def test_no_other_point_of_an_axis_is_nearer(name: str, workload: TableQuery) -> None:
    axes, found = TABLES[name].axes, SCORED[name].lookup(workload).cell

    def distance(kind: WorkloadType) -> float:
        new, output = max(workload.new_tokens, 1), max(workload.output_tokens, 1)
        return math.hypot(math.log(new) - math.log(kind.new_tokens), math.log(output) - math.log(kind.output_tokens))

    chosen = next(kind for kind in axes.workloads if kind.name == found.workload)
    assert distance(chosen) <= min(map(distance, axes.workloads)) + 1e-9
    assert abs(workload.qps - found.qps) == min(abs(workload.qps - qps) for qps in axes.qps)


@given(TABLE_NAMES, WORKLOAD, WEIGHT, WEIGHT, WEIGHT)
def test_raising_a_weight_moves_the_verdict_only_towards_what_it_favours(
    name: str, workload: TableQuery, low: float, high: float, other: float
) -> None:
    low, high = sorted((low, high))
    assume(other or low)
    less, more = (TABLES[name].lookup(workload, Weights(w_ttft, other)) for w_ttft in (low, high))
    if less.d_ttft is not None and less.d_ttft > 0 and less.local:
        assert more.local
    less, more = (TABLES[name].lookup(workload, Weights(other, w_tpot)) for w_tpot in (low, high))
    if less.d_tpot is not None and less.d_tpot > 0 and more.local:
        assert less.local
