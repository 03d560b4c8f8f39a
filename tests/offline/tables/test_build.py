"""From the runs of a sweep to decision tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.offline.experiment.cells import gather, is_evidence
from ppd.offline.experiment.records import Origin, Outcome, Record, RunResult
from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.tables.build import build_tables, write_tables
from ppd.proxy.decision_table.format import ContextClass
from ppd.proxy.decision_table.score import Evidence, Weights
from ppd.proxy.decision_table.table import DecisionTable, TableQuery
from ppd.proxy.errors import ConfigError, FormatError

SMALL = Profile(name="small", new_tokens=128, output_tokens=128)
LARGE = Profile(name="large", new_tokens=1024, output_tokens=1024)
CHAT = Profile(name="chat", new_tokens=64, output_tokens=64)
PASTE = Profile(name="paste", new_tokens=1024, output_tokens=32)
LAB = Origin(backend="target", engine="vllm 0.32.0", model="m", gpu="GPU", gpu_count=4, connector="nixl", note="a lab")
SIMULATOR = Origin(backend="simulate", engine="ppd simulator", gpu="H100", profile="h100-8b", note="")


def run(x: float | None, topology: str = "2P_2D", qps: float = 2.0, seed: int = 0, **workload: Any) -> Run:
    shape = Workload(**{"first": SMALL, "later": CHAT} | workload)
    return Run(topology=topology, workload=shape, qps=qps, x=x, seed=seed)


def request(
    number: int, turn: int, ttft_s: float | None, route: str, *, tpot_s: float = 0.01, **changes: Any
) -> Record:
    """A failed one where there is no TTFT; 11 tokens, so ten times the TPOT from the first to the last."""
    sent_s = float(number)
    fields: dict[str, Any] = {
        "conversation": number,
        "turn": turn,
        "measured": True,
        "scheduled_s": sent_s,
        "sent_s": sent_s,
        "first_token_s": None if ttft_s is None else sent_s + ttft_s,
        "last_token_s": None if ttft_s is None else sent_s + ttft_s + 10 * tpot_s,
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "output_tokens": 11,
        "route": route,
        "prefill": "",
        "decode": "D1",
        "status": 200 if ttft_s is not None else 502,
        "error": "" if ttft_s is not None else "gone",
    }
    return Record(**fields | changes)


def result(of: Run, ttft_s: Sequence[float | None] = (0.1,), **changes: Any) -> RunResult:
    """A run with one conversation for each TTFT of its second turn, all sent the way its arm says."""
    route = "LOCAL" if of.x == 1.0 else "SPLIT"
    records = [
        record
        for number, later in enumerate(ttft_s)
        for record in (request(number, 1, 0.5, "SPLIT"), request(number, 2, later, route))
    ]
    fields: dict[str, Any] = {
        "run": of,
        "outcome": Outcome.FINISHED,
        "origin": LAB,
        "started": "2026-03-01T10:00:00Z",
        "wall_s": 1.0,
        "records": tuple(records),
    }
    return RunResult(**fields | changes)


def failed(of: Run, reason: str) -> RunResult:
    return result(of, (), outcome=Outcome.FAILED, reason=reason)


def pair(**of: Any) -> list[RunResult]:
    return [result(run(0.0, **of), (0.2, 0.2)), result(run(1.0, **of), (0.1, 0.1))]


def only(results: Sequence[RunResult], **options: Any) -> DecisionTable:
    (table,) = build_tables(results, name="lab", **options)
    return table


def test_runs_at_0_and_1_are_the_arms_of_a_cell() -> None:
    split, local = (0.21, 0.19, 0.23), (0.1, 0.12)
    table = only([result(run(0.0), split), result(run(1.0), local)])
    assert (table.name, table.topology, table.axes.qps_counts) == ("lab-2P_2D", "2P_2D", "conversations")
    (cell,) = table.cells
    assert (cell.context, cell.workload, cell.qps, cell.failed) == ("small", "chat", 2.0, None)
    assert cell.split is not None and cell.local is not None
    assert (cell.split.n, cell.local.n, cell.split.failures) == (3, 2, 0)
    assert cell.split.ttft_s.mean == pytest.approx(fmean(split), abs=1e-9)
    assert cell.split.ttft_s.p50 == pytest.approx(0.21, abs=1e-9)
    assert cell.split.ttft_s.std == pytest.approx(stdev(split), abs=1e-9)
    assert cell.split.ttft_s.half_width is not None
    assert cell.local.tpot_s.mean == pytest.approx(0.01, abs=1e-9)
    verdict = table.lookup(TableQuery(64, 256, 64, 2.0), Weights())
    assert verdict.evidence is Evidence.INSIDE
    assert verdict.d_ttft == pytest.approx((0.21 - 0.11) / 0.21)


def test_seeds_are_taken_together() -> None:
    runs = [result(run(x, seed=seed), (0.1 + seed, 0.1 + seed)) for x in (0.0, 1.0) for seed in (3, 1)]
    table = only(runs)
    (cell,) = table.cells
    assert cell.split is not None
    assert cell.split.n == 4
    assert cell.split.ttft_s.mean == pytest.approx(2.1)
    assert table.provenance.seeds == (1, 3)


def test_warm_up_first_turns_and_failures_enter_no_statistic() -> None:
    records = [
        request(0, 2, 9.0, "LOCAL", measured=False),
        request(1, 1, 5.0, "SPLIT"),
        *(request(number, 2, 0.1, "LOCAL") for number in range(2, 22)),
        request(22, 2, None, "LOCAL"),
    ]
    (cell,) = only([result(run(0.0)), result(run(1.0), records=tuple(records))]).cells
    assert cell.local is not None
    assert (cell.local.n, cell.local.failures) == (20, 1)
    assert cell.local.ttft_s.p99 == pytest.approx(0.1)


def test_a_turn_that_went_another_way_than_its_arm_is_not_in_it() -> None:
    """Vetoed, or of a conversation that a mixed fleet gave to its R."""
    ways = ["SPLIT", "REPLICA", "REPLICA", *["LOCAL"] * 9]
    records = [request(number, 2, 0.1 if way == "LOCAL" else 0.9, way) for number, way in enumerate(ways)]
    (cell,) = only([result(run(0.0, "1R_1P_2D")), result(run(1.0, "1R_1P_2D"), records=tuple(records))]).cells
    assert cell.local is not None
    assert cell.local.n == 9
    assert cell.local.ttft_s.mean == pytest.approx(0.1)


def test_each_topology_and_each_kind_of_conversation_has_a_table_of_its_own() -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"topology": "1R_1P_2D"},
        {"turns": 4},
        {"think_s": 5.0, "shared_prefix_tokens": 100},
    ]
    runs = [made for kind in kinds for made in pair(**kind)]
    names = [table.name for table in build_tables(runs, name="lab")]
    assert names == ["lab-2P_2D", "lab-1R_1P_2D", "lab-2P_2D-turns4", "lab-2P_2D-think5-shared100"]


def test_what_no_decision_is_about_is_passed_over() -> None:
    others = [result(run(0.5)), result(run(None, "4R")), *pair(turns=1)]
    (table,) = build_tables([*others, *pair()], name="lab")
    assert len(table.cells) == 1


def test_the_axes_are_what_was_measured() -> None:
    runs = [made for first in (LARGE, SMALL) for later in (PASTE, CHAT) for made in pair(first=first, later=later)]
    table = only([*runs, *pair(qps=0.5)])
    assert table.axes.qps == (0.5, 2.0)
    assert [kind.name for kind in table.axes.workloads] == ["chat", "paste"]
    assert [kind.new_tokens for kind in table.axes.workloads] == [64, 1024]
    # Classes meet in the geometric middle of 256 and 2048, and the last ends at twice what was measured.
    assert table.axes.contexts == (
        ContextClass(name="small", max_tokens=724, measured_tokens=256),
        ContextClass(name="large", max_tokens=4096, measured_tokens=2048),
    )
    places = [(cell.context, cell.workload, cell.qps) for cell in table.cells]
    assert places[:3] == [("small", "chat", 0.5), ("small", "chat", 2.0), ("small", "paste", 2.0)]
    assert len(places) == 5, "what was not tried is not there"


def test_over_several_turns_a_context_is_their_geometric_mean() -> None:
    """After 256 tokens, each turn adds 128: 256, 384, 512 and 640 are held when turns 2 to 5 come."""
    (context,) = only(pair(turns=5)).axes.contexts
    assert context == ContextClass(name="small", max_tokens=848, measured_tokens=424)
    longer = only(pair(turns=40)).axes.contexts[0]
    assert longer.max_tokens == max(2 * longer.measured_tokens, 256 + 38 * 128)


def test_first_turns_that_leave_the_same_tokens_are_in_tables_apart() -> None:
    essay = Profile(name="essay", new_tokens=16, output_tokens=240)
    runs = [made for first in (SMALL, essay, LARGE) for made in pair(first=first)]
    found = {table.name: [c.name for c in table.axes.contexts] for table in build_tables(runs, name="lab")}
    assert found == {"lab-2P_2D": ["essay", "large"], "lab-2P_2D-small": ["small"]}


LATE = "the fleet stopped answering"


@pytest.mark.parametrize(
    ("local", "reason"),
    [
        ([failed(run(1.0), LATE)], LATE),
        ([failed(run(1.0, seed=s), why) for s, why in enumerate((LATE, "no D", LATE))], f"{LATE}; no D"),
        ([result(run(1.0), (0.1,) * 40), failed(run(1.0, seed=1), LATE)], LATE),
        ([result(run(1.0), (0.1, None))], "1 of 4 requests failed"),
        ([result(run(1.0), (0.1,) * 37 + (None,) * 3)], "3 of 40 later turns failed"),
        ([result(run(1.0), ())], "no later turn of this arm finished"),
        (
            [result(run(1.0), records=tuple(request(n, 2, 0.1, "LOCAL" if n < 3 else "SPLIT") for n in range(40)))],
            "37 of 40 later turns went SPLIT",
        ),
    ],
)
def test_an_arm_without_evidence_is_null_and_says_why(local: list[RunResult], reason: str) -> None:
    split = result(run(0.0), (0.2,) * 3)
    another = [result(run(0.0, qps=4.0), (0.2,) * 3), result(run(1.0, qps=4.0), (0.1,) * 3)]
    cell = only([split, *local, *another]).cells[0]
    assert cell.split is not None
    assert cell.local is None
    assert cell.failed is not None
    assert (cell.failed.split, cell.failed.local) == ("", reason)


def test_an_arm_that_was_not_tried_is_null_without_a_reason() -> None:
    table = only([result(run(0.0)), *pair(qps=4.0)])
    assert (table.cells[0].local, table.cells[0].failed) == (None, None)


def test_seeds_of_runs_that_failed_are_not_those_of_a_table() -> None:
    assert only([*pair(), failed(run(1.0, qps=4.0, seed=7), LATE)]).provenance.seeds == (0,)


def test_tables_and_report_call_the_same_cells_evidence() -> None:
    results = [
        result(run(x, qps=qps), (0.1,) * (20 - failures) + (None,) * failures)
        for qps, failures in ((1.0, 0), (2.0, 1), (4.0, 2))
        for x in (0.0, 1.0)
    ]
    found = [cell.local is not None for cell in only(results).cells]
    assert found == [is_evidence(cell) for cell in gather(results) if cell.x == 1.0] == [True, True, False]


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], "no cell has both arms, from 0 runs"),
        ([result(run(None, "4R")), result(run(0.5))], "from 0 runs"),
        ([result(run(0.0)), result(run(0.0, qps=4.0))], "from 2 runs"),
        ([result(run(0.0)), result(run(1.0, qps=4.0))], "from 2 runs"),
        ([result(run(0.0)), failed(run(1.0), LATE)], f"from 2 runs at x=0 or x=1; the first reason: {LATE}"),
    ],
)
def test_a_sweep_without_evidence_is_one_clear_error(results: list[RunResult], message: str) -> None:
    with pytest.raises(FormatError, match=f"a table without evidence: .*{message}") as caught:
        build_tables(results, name="lab")
    assert "\n" not in caught.value.message


def test_a_topology_without_evidence_does_not_cost_the_others_theirs() -> None:
    half = result(run(0.0, "1P_3D"))
    assert [table.name for table in build_tables([half, *pair()], name="lab")] == ["lab-2P_2D"]


def test_the_provenance_is_the_runs_own() -> None:
    first, second = pair()
    later = RunResult(**{name: getattr(second, name) for name in second.__struct_fields__} | {"started": "2026-03-02T"})
    origin = only([first, later], source="a sweep", licence="CC0", note="as ordered").provenance
    assert (origin.model, origin.gpu, origin.gpu_count, origin.connector) == ("m", "GPU", 4, "nixl")
    assert (origin.engine, origin.engine_version) == ("vllm", "0.32.0")
    assert (origin.source, origin.licence, origin.note) == ("a sweep", "CC0", "a lab; as ordered")
    assert (origin.date, origin.seeds) == ("2026-03-01/2026-03-02", (0,))


def test_a_simulated_table_says_so() -> None:
    origin = only([result(run(x), origin=SIMULATOR) for x in (0.0, 1.0)]).provenance
    assert (origin.engine, origin.engine_version, origin.date) == ("simulator", "", "2026-03-01")
    assert origin.note == "simulated with engine profile h100-8b, not measured"


def test_a_table_of_simulated_engines_over_http_says_so_too() -> None:
    engines = Origin(backend="target", engine="sim 0.33.0", model="m")
    origin = only([result(run(x), origin=engines) for x in (0.0, 1.0)]).provenance
    assert (origin.engine, origin.engine_version, origin.note) == ("sim", "0.33.0", "its engines were simulated")


def test_simulated_and_measured_runs_do_not_mix() -> None:
    with pytest.raises(FormatError, match="2P_2D: simulated and measured runs cannot be in one table"):
        build_tables([result(run(0.0)), result(run(1.0), origin=SIMULATOR)], name="lab")


@pytest.mark.parametrize("name", ["", "a/b", "a b", "../up", "a\n"])
def test_a_name_is_one_that_files_can_have(name: str) -> None:
    with pytest.raises(ConfigError, match="name = "):
        build_tables(pair(), name=name)


def test_tables_are_written_under_their_names_and_read_by_the_proxys_loader(tmp_path: Path) -> None:
    tables = build_tables([*pair(), *pair(turns=3)], name="lab")
    paths = write_tables(tables, tmp_path / "tables")
    assert [path.name for path in paths] == ["lab-2P_2D.json", "lab-2P_2D-turns3.json"]
    assert [DecisionTable.load(path) for path in paths] == tables
    assert sorted(paths) == sorted((tmp_path / "tables").iterdir())


def test_of_earlier_tables_none_is_left_beside_the_new_ones(tmp_path: Path) -> None:
    write_tables(build_tables([*pair(), *pair(turns=3)], name="old"), tmp_path)
    others = {"notes.json": b"{}", "broken.json": b"{", "mine.txt": b"kept", "renamed.json": b""}
    others["renamed.json"] = (tmp_path / "old-2P_2D.json").read_bytes()
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    write_tables(build_tables(pair(), name="new"), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"new-2P_2D.json", *others}


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "lab-2P_2D.json").mkdir()
    with pytest.raises(FormatError, match=r"lab-2P_2D.json: cannot be written"):
        write_tables(build_tables(pair(), name="lab"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lab-2P_2D.json"]


PROFILES = st.builds(
    lambda number, new, output: Profile(name=f"p{number}", new_tokens=new, output_tokens=output),
    st.integers(0, 99),
    st.integers(1, 5000),
    st.integers(1, 5000),
)


@pytest.mark.slow
@given(
    st.lists(PROFILES, min_size=1, max_size=6, unique_by=lambda profile: profile.name),
    st.lists(PROFILES, min_size=1, max_size=3, unique_by=(lambda p: p.name, lambda p: (p.new_tokens, p.output_tokens))),
    st.integers(2, 9),
)
def test_every_measured_cell_is_found_where_it_was_measured(
    firsts: list[Profile], laters: list[Profile], turns: int
) -> None:
    runs = [made for first in firsts for later in laters for made in pair(first=first, later=later, turns=turns)]
    tables = build_tables(runs, name="lab")
    assert sum(len(table.cells) for table in tables) == len(firsts) * len(laters)
    for table in tables:
        for context in table.axes.contexts:
            for kind in table.axes.workloads:
                asked = TableQuery(kind.new_tokens, context.measured_tokens, kind.output_tokens, 2.0)
                verdict = table.lookup(asked, Weights())
                assert (verdict.cell.context, verdict.cell.workload) == (context.name, kind.name)
                assert verdict.evidence is Evidence.INSIDE
