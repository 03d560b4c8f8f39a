"""Medians, ratios and verdicts of what was measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.overhead.peers import PEERS
from benchmarks.overhead.records import Durations, LoadResult, Machine, OverheadRun, RowRecord
from benchmarks.overhead.report import LineVerdict, ReportCell, cells, compare, markdown
from benchmarks.overhead.rows import LINES, ROWS, Better, ReportLine
from benchmarks.overhead.subjects import SUBJECTS, SubjectPorts, subject


def rate(record: RowRecord) -> float | None:
    return record.load.right / record.load.seconds if record.load else None


def line(
    better: Better = Better.MORE, target: float | None = 1.5, limit: float | None = None, *, is_added: bool = False
) -> ReportLine:
    return ReportLine(
        row="c=1", title="t", value=rate, digits=0, better=better, target=target, limit=limit, is_added=is_added
    )


def record(subject: str, right: int, repetition: int = 0, *, wrong: int = 0, row: str = "c=1") -> RowRecord:
    load = LoadResult(seconds=2.0, asked=right, right=right, wrong=wrong)
    return RowRecord(row=row, subject=subject, repetition=repetition, load=load)


def test_a_cell_is_the_median_of_its_repetitions_with_their_faults_together() -> None:
    records = [record("ppd", 20, 0, wrong=1), record("ppd", 90, 1, wrong=2), record("ppd", 40, 2)]
    assert cells(line(), [*records, record("ppd", 2, row="c=16")]) == {"ppd": ReportCell(20.0, 3)}


def test_what_is_added_to_a_direct_connection_is_unknown_without_one() -> None:
    added = line(is_added=True)
    assert cells(added, [record("ppd", 20)])["ppd"].value is None
    assert {name: cell.value for name, cell in cells(added, [record("ppd", 20), record("direct", 6)]).items()} == {
        "ppd": 7.0,
        "direct": 3.0,
    }


@pytest.mark.parametrize(
    ("of", "values", "verdict"),
    [
        (line(), {"ppd": 15.0, "smg": 5.0, "vllm-router": 10.0}, LineVerdict(1.5, "vllm-router", True)),
        (line(), {"ppd": 14.9, "smg": 5.0, "vllm-router": 10.0}, LineVerdict(1.49, "vllm-router", False)),
        (line(Better.LESS, 0.8), {"ppd": 4.0, "smg": 5.0, "vllm-router": 10.0}, LineVerdict(0.8, "smg", True)),
        (line(Better.LESS, 0.8), {"ppd": 4.5, "smg": 5.0, "vllm-router": 10.0}, LineVerdict(0.9, "smg", False)),
        (line(Better.LESS, None, 15.0), {"ppd": 15.0, "smg": 5.0}, LineVerdict(3.0, "smg", True)),
        (line(Better.LESS, 0.8, 0.4), {"ppd": 0.5, "smg": 5.0}, LineVerdict(0.1, "smg", False)),
        (line(Better.LESS, None, 0.0), {"ppd": 0.0, "smg": 0.0}, LineVerdict(None, "smg", True)),
        (line(target=None), {"ppd": 1.0, "smg": 2.0}, LineVerdict(0.5, "smg", None)),
        (line(), {"ppd": 15.0, "direct": 99.0}, LineVerdict(None, "", None)),
        (line(), {"smg": 5.0}, LineVerdict(None, "smg", None)),
    ],
)
def test_the_verdict_compares_with_the_best_peer(
    of: ReportLine, values: dict[str, float], verdict: LineVerdict
) -> None:
    found = compare(of, {name: ReportCell(value) for name, value in values.items()})
    assert (found.best, found.holds) == (verdict.best, verdict.holds)
    assert found.ratio == (None if verdict.ratio is None else pytest.approx(verdict.ratio))


def test_a_target_does_not_hold_with_faults() -> None:
    assert compare(line(), {"ppd": ReportCell(20.0, faults=1), "smg": ReportCell(10.0)}).holds is False


def test_every_line_reads_a_row_and_every_row_is_read() -> None:
    assert {line.row for line in LINES} == {row.name for row in ROWS}


def run_of(*records: RowRecord, repetitions: int = 1, versions: dict[str, str] | None = None) -> OverheadRun:
    return OverheadRun(
        date="2026-01-01",
        seconds=2.0,
        repetitions=repetitions,
        machine=Machine("a core", 2, 8, "6.1", "3.11"),
        versions=versions or {},
        ppd_args=(),
        took_s=1.0,
        records=records,
    )


def test_the_table_says_why_a_peer_has_no_figure_and_counts_faults() -> None:
    spread = Durations(10, 1000.0, 2000.0, 3000.0, 4000.0)
    load = LoadResult(seconds=2.0, asked=2500, right=2469, wrong=31, whole=spread)
    run = run_of(
        RowRecord(row="c=16", subject="ppd", repetition=0, load=load, cpu_s=1.0),
        RowRecord(row="c=16", subject="smg", repetition=0, problem="is not there"),
        RowRecord(row="c=16", subject="smg", repetition=1, problem="is not there"),
        versions={"smg": "not installed"},
    )
    text = markdown(run)
    assert "| c=16, requests/s | 1,234 (31 faults) | n/a | – | ≥ 1.5 x |  |" in text
    assert "| c=16, CPU us a request | 405 (31 faults) | n/a |" in text
    assert text.count("is not there") == 1
    assert "P then D" not in text


def test_another_build_is_compared_within_each_repetition() -> None:
    """So that a machine that slows down between repetitions changes no ratio."""
    records = [record("ppd", 20, 0), record("ppd before", 10, 0), record("ppd", 6, 1), record("ppd before", 4, 1)]
    at_16 = [msgspec.structs.replace(one, row="c=16") for one in (*records, record("ppd", 9, 2))]
    run = run_of(*at_16, repetitions=3)
    assert "| c=16, requests/s | 4 | 4 | 1.75 (1.50, 2.00) |" in markdown(run)
    assert "ppd / before" not in markdown(msgspec.structs.replace(run, records=run.records[:1]))


def test_peers_that_know_sessions_are_a_comparison_of_their_own() -> None:
    rates = {"ppd": 20, "smg": 40, "smg:cache_aware": 10, "vllm-router:consistent_hash": 5}
    table = markdown(run_of(*(record(name, right, row="c=16") for name, right in rates.items())))
    assert "| ppd / best that knows sessions | ppd / best peer |" in table
    assert "| c=16, requests/s | 10 | 20 | 2 | 5 | 2.00 (smg:cache_aware) | 0.50 (smg) |" in table


@pytest.mark.parametrize("name", SUBJECTS[1:])
def test_a_subject_is_named_with_the_policy_that_it_is_started_with(tmp_path: Path, name: str) -> None:
    one = subject(name, tmp_path)
    argv = one.plain(SubjectPorts(1, 2, 3, 4))
    peer, _, policy = name.partition(":")
    assert one.name == name
    assert peer.split()[0] == Path(argv[0]).name
    if peer in PEERS:
        assert argv[argv.index("--policy") + 1] == (policy or "round_robin")
