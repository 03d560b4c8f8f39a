from __future__ import annotations

import pytest

from ppd.offline.backends.fleet_view import FleetView, ListedWorker
from ppd.offline.backends.live import too_many_failures
from ppd.offline.backends.target import served_model
from ppd.offline.experiment.records import Record
from ppd.offline.load.target import Target
from ppd.proxy.errors import ConfigError
from tests.support.sweep import record


def requests(good: int, bad: int) -> list[Record]:
    return [record() for _ in range(good)] + [record(error=f"error {n}") for n in range(bad)]


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        (requests(10, 0), ""),
        (requests(5, 5), ""),
        (requests(4, 5), "5 of 9 requests failed, the first with: error 0"),
        (requests(0, 1), "1 of 1 requests failed, the first with: error 0"),
        ([], ""),
    ],
)
def test_a_run_of_which_most_requests_fail_has_failed(records: list[Record], reason: str) -> None:
    assert too_many_failures(records, 0.5) == reason


def serving(*models: tuple[str, ...]) -> FleetView:
    return FleetView(
        tuple(ListedWorker(f"R{n}", "R", "up", each, "vllm", "1", "none", "", 0) for n, each in enumerate(models))
    )


@pytest.mark.parametrize(
    ("models", "wanted", "chosen"),
    [
        ((("a",), ("a",)), "", "a"),
        ((("a", "b"), ("a",)), "", "a"),
        ((("a", "b"), ("a", "b")), "b", "b"),
    ],
)
def test_a_model_that_all_workers_serve_is_asked_for(models: tuple[tuple[str, ...]], wanted: str, chosen: str) -> None:
    assert served_model(serving(*models), Target(url="http://a", model=wanted)) == chosen


@pytest.mark.parametrize(
    ("models", "wanted", "said"),
    [
        ((("a", "b"),), "", r"model = '': must be one that all workers of http://a serve: a, b"),
        ((("a",), ("b",)), "", r"there is none"),
        ((("a",),), "c", r"model = 'c': must be one that all workers of http://a serve: a"),
        ((), "", r"there is none"),
    ],
)
def test_a_model_that_is_not_served_everywhere_is_refused(
    models: tuple[tuple[str, ...]], wanted: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        served_model(serving(*models), Target(url="http://a", model=wanted))
