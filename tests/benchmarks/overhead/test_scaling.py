"""What the table of processes says of its trials."""

from __future__ import annotations

from benchmarks.overhead.records import LoadResult, Machine, OverheadRun, RowRecord
from benchmarks.overhead.scaling import SEPARATE, SHARED, markdown

MACHINE = Machine(cpu="c", cores=2, memory_gib=1, kernel="k", python="p")


def trial(row: str, repetition: int, right: int, cpu_s: float, problem: str = "") -> RowRecord:
    load = LoadResult(seconds=2.0, asked=right, right=right)
    return RowRecord(row=row, subject="ppd", repetition=repetition, load=load, cpu_s=cpu_s, problem=problem)


def table(*records: RowRecord) -> str:
    run = OverheadRun(
        date="d", seconds=2.0, repetitions=3, machine=MACHINE, versions={}, ppd_args=(), took_s=1.0, records=records
    )
    return markdown(run, 2)


def test_ratios_are_of_neighbours_and_cells_are_medians_with_their_bounds() -> None:
    said = table(
        *(trial(SEPARATE, 0, 4000, 1.0), trial(SHARED, 0, 3000, 1.5)),
        *(trial(SEPARATE, 1, 2000, 1.0), trial(SHARED, 1, 2000, 1.0)),
        *(trial(SEPARATE, 2, 2000, 0.5), trial(SHARED, 2, 1700, 0.85, "slow")),
    )
    assert "| 2 proxies of 1 process | 1,000 (1,000 to 2,000) | 250 (250 to 500) |" in said
    assert "| 2 processes of 1 proxy | 1,000 (850 to 1,500) | 500 (500 to 500) |" in said
    assert "to one process | 1.70 (1.50 to 2.00) x | 1.00 (1.00 to 2.00) x by CPU time |" in said
    assert "slow" in said


def test_a_trial_that_failed_is_told_and_left_out() -> None:
    said = table(
        *(trial(SEPARATE, 0, 2000, 1.0), trial(SHARED, 0, 1500, 1.0)),
        *(RowRecord(row=SEPARATE, subject="ppd", repetition=1, problem="it ended"), trial(SHARED, 1, 8000, 1.0)),
        *(trial(SEPARATE, 2, 1000, 0.5), trial(SHARED, 2, 0, 1.0)),
    )
    assert "to one process | 1.50 (1.50 to 1.50) x | 1.50 (1.50 to 1.50) x by CPU time |" in said
    assert "it ended" in said
    nothing = table(RowRecord(row=SEPARATE, subject="ppd", repetition=0, problem="it ended"))
    assert "| 2 processes of 1 proxy | – | – |" in nothing
