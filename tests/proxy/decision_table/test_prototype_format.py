"""Tables as the paper's prototype exports them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppd.proxy.decision_table.format import Arm, FailedArms, Tpot, Ttft
from ppd.proxy.decision_table.score import CellKey, Evidence, Weights
from ppd.proxy.decision_table.table import DecisionTable, TableQuery, bundled
from ppd.proxy.errors import FormatError

TYPES = "tiny short_gen long_gen very_long_gen small_bal mid_bal mid_paste big_paste huge_paste".split()


def entry(context: str = "small", workload: str = "tiny", qps: float = 2, **changes: Any) -> dict[str, Any]:
    figures = {"pd_ttft_ms": 90.0, "ppd_ttft_ms": 45.0, "pd_tpot_ms": 8.0, "ppd_tpot_ms": 8.4}
    decided = {"use_ppd": True, "score": 0.45}
    return {"context_class": context, "workload_type": workload, "qps": qps, **decided, **figures, **changes}


def exported(*entries: dict[str, Any], **changes: Any) -> bytes:
    table = {"base_config": "2P_2D", "ppd_config": "2P_2pD", "weights": {"w_ttft": 1.0, "w_tpot": 1.0}}
    return json.dumps({**table, "entries": list(entries), **changes}).encode()


def test_the_means_become_arms_of_which_nothing_else_is_recorded() -> None:
    table = DecisionTable.decode(exported(entry()))
    assert (table.name, table.topology) == ("prototype-2P_2D", "2P_2D")
    (cell,) = table.cells
    assert cell.split == Arm(
        n=None,
        failures=None,
        ttft_s=Ttft(mean=0.09, p50=None, p99=None, std=None),
        tpot_s=Tpot(mean=0.008, p50=None, p99=None, std=None),
    )
    assert cell.local is not None
    assert (cell.local.ttft_s.mean, cell.local.tpot_s.mean) == (0.045, 0.0084)
    assert cell.failed is None


def test_it_becomes_a_file_of_the_projects_own_format() -> None:
    table = DecisionTable.decode(exported(entry(), entry("large", "mid_bal", pd_ttft_ms=0)))
    assert DecisionTable.decode(table.encode()) == table
    assert b'"kind": "ppd-decision-table"' in table.encode()


def test_its_decisions_are_made_anew_for_the_operators_weights() -> None:
    table = DecisionTable.decode(exported(entry(use_ppd=False, score=-1.0)))
    workload = TableQuery(16, 256, 32, 2.0)
    verdict = table.lookup(workload, Weights(1, 1))
    assert verdict.local is True
    assert verdict.score == pytest.approx(0.5 - 0.05)
    assert table.lookup(workload, Weights(1, 11)).local is False


@pytest.mark.parametrize(
    ("zero", "split", "local"),
    [
        ("pd_ttft_ms", False, True),
        ("pd_tpot_ms", False, True),
        ("ppd_ttft_ms", True, False),
        ("ppd_tpot_ms", True, False),
    ],
)
def test_a_zero_is_a_run_that_failed_and_no_evidence(zero: str, split: bool, local: bool) -> None:
    table = DecisionTable.decode(exported(entry() | {zero: 0}))
    (cell,) = table.cells
    assert (cell.split is not None, cell.local is not None) == (split, local)
    assert cell.failed is not None
    assert (bool(cell.failed.split), bool(cell.failed.local)) == (not split, not local)
    assert table.lookup(TableQuery(16, 256, 32, 2.0), Weights()).evidence is Evidence.NONE


def test_a_cell_of_zeros_has_two_reasons() -> None:
    zeros = dict.fromkeys(("pd_ttft_ms", "ppd_ttft_ms", "pd_tpot_ms", "ppd_tpot_ms"), 0)
    (cell,) = DecisionTable.decode(exported(entry() | zeros)).cells
    assert (cell.split, cell.local) == (None, None)
    assert cell.failed is not None
    assert cell.failed != FailedArms()


def test_the_names_have_the_centres_of_its_benchmark() -> None:
    names = [(context, workload) for context in ("small", "large") for workload in TYPES]
    table = DecisionTable.decode(exported(*(entry(*name, qps=qps) for name in names for qps in (4, 0.5))))
    shipped = DecisionTable.load(bundled()["h100-llama-3.1-8b-2P_2D"]).axes
    assert (table.axes.contexts, table.axes.workloads) == (shipped.contexts, shipped.workloads)
    assert table.axes.qps == (0.5, 4.0)
    assert table.axes.qps_counts == "conversations"


@pytest.mark.parametrize("ttft_ms", [45.0, 46.0])
def test_a_huge_context_that_is_a_copy_of_large_is_no_measurement(ttft_ms: float) -> None:
    data = exported(entry("large"), entry("large", qps=4), entry("huge", ppd_ttft_ms=ttft_ms))
    table = DecisionTable.decode(data)
    far = table.lookup(TableQuery(16, 6000, 32, 2.0), Weights())
    if ttft_ms == 45.0:
        assert (far.cell, far.evidence) == (CellKey("large", "tiny", 2.0), Evidence.EXTRAPOLATED)
    else:
        assert (far.cell, far.evidence) == (CellKey("huge", "tiny", 2.0), Evidence.INSIDE)


@pytest.mark.parametrize(
    ("entries", "weights", "said"),
    [
        ([entry()], (1, 1), "Its own decisions, at w_ttft 1, w_tpot 1, are not used."),
        ([entry(use_ppd=False)], (1, 1), "1 of 1 contradict its figures, small/tiny/2 the first."),
        ([entry(use_ppd=False)], (1, 20), "w_tpot 20, are not used."),
        ([entry(), entry(qps=4, use_ppd=False)], (1, 1), "1 of 2 contradict its figures, small/tiny/4 the first."),
        # At most rounding: the score is 0.5 - 9.9 * 0.05 = 0.005.
        ([entry(use_ppd=False)], (1, 9.9), "w_tpot 9.9, are not used."),
        # A forced decision where P had failed contradicts nothing.
        ([entry(pd_ttft_ms=0, use_ppd=True)], (1, 1), "w_tpot 1, are not used."),
    ],
)
def test_the_note_says_what_its_own_decisions_are_worth(
    entries: list[dict[str, Any]], weights: tuple[float, float], said: str
) -> None:
    data = exported(*entries, weights={"w_ttft": weights[0], "w_tpot": weights[1]})
    assert DecisionTable.decode(data).provenance.note.endswith(said)


def test_fields_that_are_not_needed_may_be_there() -> None:
    table = DecisionTable.decode(exported(entry(confidence=0.9), created="2026-05-01"))
    assert len(table.cells) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (exported(), r"length >= 1 - at `\$.entries`"),
        (exported(entry("medium")), r"'medium' - at `\$.entries\[0\].context_class`"),
        (exported(entry(workload="chat")), r"entries\[0\].workload_type: 'chat' is not the prototype's"),
        (exported(entry(qps=0)), r"> 0.0 - at `\$.entries\[0\].qps`"),
        (exported(entry(pd_ttft_ms=-1)), r">= 0.0 - at `\$.entries\[0\].pd_ttft_ms`"),
        (exported(entry(pd_ttft_ms=None)), r"got `null` - at `\$.entries\[0\].pd_ttft_ms`"),
        (exported(entry(), entry()), r"cells: .*tiny.* occurs twice"),
        (exported(entry(), weights={"w_ttft": 1}), r"missing required field `w_tpot` - at `\$.weights`"),
        (exported(entry()).replace(b'"entries"', b'"cells"'), r"missing required field `entries`"),
        (exported(entry(), ppd_config=3), r"got `int` - at `\$.ppd_config`"),
        (exported(entry(), base_config=""), r"missing required field `version`"),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_field(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "theirs.json"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=rf"theirs.json: .*{message}"):
        DecisionTable.load(path)
