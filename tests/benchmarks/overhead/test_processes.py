"""Who runs where, what it used, and which rows are asked for."""

from __future__ import annotations

import os

import pytest

from benchmarks.overhead.processes import Cores, assign_cores
from benchmarks.overhead.records import LoadResult, RowRecord, Stats
from benchmarks.overhead.rows import ROWS, Row
from benchmarks.overhead.subjects import DIRECT, FleetKind
from benchmarks.overhead.trials import select, stray_legs
from benchmarks.overhead.usage import ProcessUsage, ResourceUsage, family, parse_stat, total

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("cores", "proxy", "mock", "load"), [([3], 3, 3, 3), ([0, 1], 1, 0, 0), ([1, 0, 5], 5, 0, 1), (range(8), 7, 0, 1)]
)
def test_the_proxy_has_a_core_of_its_own_if_there_are_two(cores: list[int], proxy: int, mock: int, load: int) -> None:
    assert assign_cores(cores) == Cores(frozenset({proxy}), frozenset({mock}), frozenset({load}))


@pytest.mark.parametrize("name", ["ppd", "a (b) c", ") 1 ("])
def test_a_process_is_read_whatever_its_name(name: str) -> None:
    numbers = ["S", "7", *"0" * 9, f"{TICKS}", f"{2 * TICKS}", f"{TICKS}", "0", *"0" * 5, "10", "25", *"0" * 20]
    pages = 25 * os.sysconf("SC_PAGE_SIZE") // 1024
    assert parse_stat(f"42 ({name}) {' '.join(numbers)}\n") == ProcessUsage(42, 7, 4.0, pages)


def test_usage_is_of_the_whole_family_and_of_nobody_else() -> None:
    processes = {
        process.pid: process
        for process in (
            ProcessUsage(10, 1, 1.0, 100),
            ProcessUsage(11, 10, 2.0, 200),
            ProcessUsage(12, 11, 4.0, 400),
            ProcessUsage(13, 1, 8.0, 800),
        )
    }
    assert total(family(10, processes)) == ResourceUsage(7.0, 700)
    assert total(family(99, processes)) == ResourceUsage(0.0, 0)


def test_a_row_brings_the_one_that_it_builds_upon() -> None:
    assert [row.name for row in select(["idle 5000", "c=1"])] == ["idle 1000", "idle 5000", "c=1"]
    assert select([]) == ROWS


@pytest.mark.parametrize(
    ("fleet", "subject", "backend", "problem"),
    [
        (FleetKind.PLAIN, "ppd", Stats(prefills=1), ""),
        (FleetKind.PLAIN, "ppd", Stats(prefills=30), "30 of 100 requests were not one leg"),
        (FleetKind.PAIR, "ppd", Stats(prefills=100, handovers=100), ""),
        (FleetKind.PAIR, "ppd", Stats(prefills=100, handovers=40), "60 of 100 requests were not P and then D"),
        (FleetKind.PAIR, DIRECT, Stats(), ""),
    ],
)
def test_a_figure_of_other_work_is_marked(fleet: FleetKind, subject: str, backend: Stats, problem: str) -> None:
    record = RowRecord(row="r", subject=subject, repetition=0, load=LoadResult(1.0, 100, 100), backend=backend)
    assert stray_legs(Row(name="r", connections=1, fleet=fleet), record) == problem
