"""What the table of processes says of its trials."""

from __future__ import annotations

from overhead.records import Load, Machine, Record, Run
from overhead.scaling import markdown, title

MACHINE = Machine(cpu="c", cores=2, memory_gib=1, kernel="k", python="p")


def trial(processes: int, repetition: int, right: int, cpu_s: float, problem: str = "") -> Record:
    load = Load(seconds=2.0, asked=right, right=right)
    return Record(row=title(processes), subject="ppd", repetition=repetition, load=load, cpu_s=cpu_s, problem=problem)


def table(*records: Record) -> str:
    run = Run(
        date="d", seconds=2.0, repetitions=3, machine=MACHINE, versions={}, ppd_args=(), took_s=1.0, records=records
    )
    return markdown(run, 2)


def test_ratios_are_of_neighbours_and_cells_are_medians_with_their_bounds() -> None:
    said = table(
        *(trial(1, 0, 2000, 1.0), trial(2, 0, 3000, 2.0)),
        *(trial(1, 1, 1000, 1.0), trial(2, 1, 2000, 1.0)),
        *(trial(1, 2, 1000, 0.5), trial(2, 2, 1700, 1.7, "slow")),
    )
    assert "| 1 process | 500 (500 to 1,000) | 500 (500 to 1,000) |" in said
    assert "| 2 processes | 1,000 (850 to 1,500) | 667 (500 to 1,000) |" in said
    assert "| ratio | 1.70 (1.50 to 2.00) | 2 cores have CPU time for 1.50 (1.00 to 4.00) |" in said
    assert "2 processes: slow" in said


def test_a_trial_that_failed_is_told_and_left_out() -> None:
    said = table(
        *(trial(1, 0, 2000, 1.0), trial(2, 0, 3000, 2.0)),
        *(Record(row=title(1), subject="ppd", repetition=1, problem="it ended"), trial(2, 1, 8000, 1.0)),
        *(trial(1, 2, 1000, 0.5), trial(2, 2, 0, 1.0)),
    )
    assert "| ratio | 1.50 (1.50 to 1.50) | 2 cores have CPU time for 1.50 (1.50 to 1.50) |" in said
    assert "it ended" in said
    nothing = table(Record(row=title(1), subject="ppd", repetition=0, problem="it ended"))
    assert "| 2 processes | – | – |" in nothing
