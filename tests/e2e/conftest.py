"""Tests over real sockets: simulated engines, and the real proxy before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ppd.servers.fleet.ports import free_ports
from tests.support.announcements import Sender
from tests.support.fleet import Fleet


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e/" in item.nodeid:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture
def start_fleet() -> Callable[..., Any]:
    """`async with start_fleet("P1 D1 D2 R1", mode=...) as fleet`: see `Fleet.of`."""
    return Fleet.of


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def sender(port: int) -> Iterator[Sender]:
    made = Sender(port)
    yield made
    made.close()
