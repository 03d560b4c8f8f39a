"""A run: its jobs and their order, where it goes on, and how long it says that it takes."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks.policies import campaign as campaigns
from benchmarks.policies import records
from benchmarks.policies.campaign import Campaign, common_rate
from benchmarks.policies.cells import PARTS, Cell, cells_of
from benchmarks.policies.measuring import MeasureJob, Method, Question
from benchmarks.policies.records import AtRate, CellRecord

METHOD = Method(data=Path("/data"), questions=(Question(0.025, 0.9, 2),))
NAME = METHOD.questions[0].name
PAIRS, REPLICAS = Cell("chats", "1P_1D"), Cell("chats", "2R")
RATES = {"always_local": (4.0, 6.0), "always_split": (1.0, 1.0), "replica": (2.0, 2.0)}
FIGURES = dict.fromkeys(("first_share", "later_share", "moved_bytes_a_turn", "recomputed_share"), 0.0)


def at(rate: float) -> AtRate:
    nothing = (None, None)
    return AtRate(
        rate=rate, seeds=3, turns=0, unfinished=0, ttft_first=nothing, ttft_later=nothing, tpot=nothing,
        prefill_ratio=1.0, **FIGURES,
    )  # fmt: skip


class Instantly:
    """Answers each job at once, with what RATES say."""

    places = 2

    def __init__(self) -> None:
        self.jobs: list[MeasureJob] = []

    def submit(self, job: MeasureJob) -> Future[CellRecord]:
        self.jobs.append(job)
        found = CellRecord(cell=job.cell.name, mode=job.mode, goodput={}, method=job.method.name, windows=1, cpu_s=2.0)
        if job.at_rate is None:
            found = msgspec.structs.replace(found, goodput={NAME: RATES[job.mode]})
        else:
            tpot_s = job.method.questions[0].tpot_s
            found = msgspec.structs.replace(found, at_rate=msgspec.structs.replace(at(job.at_rate), tpot_s=tpot_s))
        done = Future[CellRecord]()
        done.set_result(found)
        return done

    def close(self) -> None: ...


def campaign(folder: Path, *cells: Cell, subject: str = "slo") -> Campaign:
    return Campaign(cells=cells, modes=tuple(RATES), subject=subject, method=METHOD, folder=folder)


def run(one: Campaign, jobs: int = 1000) -> list[MeasureJob]:
    executor = Instantly()
    campaigns.run(one, executor, lambda outcome, running: None, lambda: len(executor.jobs) >= jobs)
    return executor.jobs


def test_each_mode_is_searched_near_the_one_before_and_then_all_are_played_at_one_rate(tmp_path: Path) -> None:
    jobs = run(campaign(tmp_path, PAIRS))
    assert [(job.mode, job.at_rate) for job in jobs] == [
        ("always_local", None),
        ("always_split", None),
        ("always_local", pytest.approx(4.5)),
        ("always_split", pytest.approx(4.5)),
    ]
    assert jobs[1].near == {NAME: (4.0, 6.0)}
    kept = records.load(tmp_path, PAIRS.name, METHOD.name)["always_local"]
    assert kept.goodput == {NAME: (4.0, 6.0)}
    assert kept.at_rate is not None
    assert (kept.windows, kept.cpu_s) == (2, 4.0)


def test_figures_by_another_tpot_are_no_answer_though_the_rate_is_the_same(tmp_path: Path) -> None:
    run(campaign(tmp_path, PAIRS))
    slow = replace(METHOD, questions=(Question(0.05, 0.9, 2),))
    for kept in records.load(tmp_path, PAIRS.name, METHOD.name).values():
        records.append(tmp_path, msgspec.structs.replace(kept, goodput={slow.questions[0].name: RATES[kept.mode]}))
    again = replace(campaign(tmp_path, PAIRS), method=slow)
    assert again.seconds_left(1) > 0.0
    assert [job.mode for job in run(again) if job.at_rate is not None] == ["always_local", "always_split"]


def test_rules_for_pairs_are_not_measured_on_replicas_nor_replicas_rule_on_pairs(tmp_path: Path) -> None:
    jobs = run(campaign(tmp_path, PAIRS, REPLICAS))
    assert {(job.cell, job.mode) for job in jobs} == {
        (PAIRS, "always_local"),
        (PAIRS, "always_split"),
        (REPLICAS, "replica"),
    }


@pytest.mark.parametrize("before", range(7))
def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path, before: int) -> None:
    one = campaign(tmp_path, PAIRS, REPLICAS)
    first = run(one, before)
    assert len(first) + len(run(one)) == 6
    assert run(one) == []
    assert one.seconds_left(2) == 0.0


def test_a_mode_is_measured_again_in_the_cells_of_the_run_and_nothing_else_is(tmp_path: Path) -> None:
    both, pairs = campaign(tmp_path, PAIRS, REPLICAS), campaign(tmp_path, PAIRS)
    run(both)
    for cell in (PAIRS, REPLICAS):
        other = CellRecord(cell=cell.name, mode="replica", goodput={"50ms@0.9": (1.0,)}, method="another")
        records.append(tmp_path, other)
    assert pairs.seconds_left(1) == 0.0
    assert pairs.seconds_left(1, ["always_local"]) > 0.0
    pairs.forget(["always_local", "replica"])
    assert {(job.cell, job.mode) for job in run(both)} == {(PAIRS, "always_local")}
    assert records.load(tmp_path, PAIRS.name, "another").keys() == {"replica"}


def test_the_subject_does_not_set_the_rate_at_which_it_is_compared() -> None:
    found = {mode: CellRecord(cell="c", mode=mode, goodput={NAME: rates}) for mode, rates in RATES.items()}
    assert common_rate(found, NAME, "slo") == pytest.approx(4.5)
    assert common_rate(found, NAME, "always_local") == pytest.approx(1.8)
    assert common_rate({}, NAME, "slo") == 0.0


def test_what_is_left_costs_what_was_measured(tmp_path: Path) -> None:
    one = campaign(tmp_path, PAIRS, REPLICAS)
    records.append(
        tmp_path,
        CellRecord(
            cell=REPLICAS.name, mode="replica", goodput={NAME: (1.0, 1.0)}, method=METHOD.name, cpu_s=100.0, windows=9
        ),
    )
    # Two modes on the pairs and one on replicas, of as many workers; a cell's jobs follow one another.
    assert one.seconds_left(1) == pytest.approx(300.0)
    assert one.seconds_left(64) == pytest.approx(200.0)


def test_the_parts_hold_the_cells_of_the_targets() -> None:
    assert len(PARTS["traces"]) == 18
    assert len(set(cells_of(tuple(PARTS)))) == len(list(cells_of(tuple(PARTS))))
