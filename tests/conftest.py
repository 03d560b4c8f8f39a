"""Fakes and factories that several test files share."""

from __future__ import annotations

import asyncio
import gc
import os

import pytest
from aiohttp import web_app
from hypothesis import HealthCheck, settings

from ppd.proxy.config import DataPlane
from ppd.servers.fleet import ports
from tests.support import proxy as proxy_client
from tests.support.clock import FakeClock
from tests.tidy_loop import TidyLoops
from tests.whole_tables import WholeTables

# The same examples everywhere and no clock: a slow machine must not fail a test, nor a lucky one pass it.
settings.register_profile("project", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("project"), max_examples=25)  # `make check`'s
settings.load_profile("project")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--data-plane", choices=[*DataPlane], default=DataPlane.NATIVE, help="what proxies of tests run on"
    )
    parser.addoption("--whole-tables", action="store_true", help="all rows of a table are one test")


def keep_ports_apart() -> None:
    """A program takes a second to bind the port that was found free for it: until then no other of pytest's processes
    may find the same one."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(worker.removeprefix("gw")) % count
    ports._given.update(port for port in ports._ANYWHERE if port % count != number)


def pytest_configure(config: pytest.Config) -> None:
    keep_ports_apart()
    asyncio.set_event_loop_policy(TidyLoops())
    proxy_client.DEFAULTS["data_plane"] = DataPlane(config.getoption("--data-plane"))
    if config.getoption("--whole-tables"):
        config.pluginmanager.register(WholeTables())
    gc.disable()  # until all is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that at the end no process is left with it alone."""
    items.sort(key=lambda item: item.get_closest_marker("wheel") is None)


def pytest_collection_finish() -> None:
    """Thousands of tests and what they import stay to the end: a collector that walks them again and again is dear."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    gc.enable()


def pytest_runtest_logfinish() -> None:
    """aiohttp keeps the handlers of 1,024 routes, and with each a whole engine: gigabytes for the collector to walk."""
    web_app._cached_build_middleware.cache_clear()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
