from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.support.proxy_thread import Alarms, Target, run_target


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/fuzz/" in item.nodeid:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(autouse=True)
def quiet() -> None:
    """What a test before this one left behind is not this one's."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, Alarms):
            handler.records.clear()


@pytest.fixture(scope="module")
def start_target() -> Iterator[Callable[..., Target]]:
    """`start_target("P1 D1", mode=...)`: it runs until the module's tests are done."""
    stop = threading.Event()
    threads: list[threading.Thread] = []
    targets: list[Target] = []

    def begin(names: str, **settings: Any) -> Target:
        ready: Future[Target] = Future()
        threads.append(threading.Thread(target=run_target, args=(names, settings, ready, stop)))
        threads[-1].start()
        target = ready.result(30)
        targets.append(target)
        logging.getLogger().addHandler(target.alarms)
        return target

    yield begin
    for target in targets:
        logging.getLogger().removeHandler(target.alarms)
    stop.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
