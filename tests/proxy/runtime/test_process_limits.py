from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from ppd.proxy.errors import ConfigError
from ppd.proxy.runtime.process_limits import (
    THREADS,
    check_threads,
    open_files_limit,
    raise_open_files_limit,
    share_of_clients,
    share_of_gateways,
)


@pytest.fixture
def hard() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_to_the_hard_one(hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    assert open_files_limit() == 256
    raise_open_files_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    assert open_files_limit() == (sys.maxsize if hard == resource.RLIM_INFINITY else hard)


@pytest.mark.parametrize(("files", "is_enough"), [(130, False), (131, True)])
def test_too_few_files_for_one_client_are_told_of(files: int, is_enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with nullcontext() if is_enough else pytest.raises(ConfigError, match=r"needs 131 at least.*ulimit -n"):
        raise_open_files_limit()


@pytest.mark.parametrize(("files", "share"), [(1024, 298), (431, 101), (430, 100), (134, 2), (128, 1), (20, 1)])
def test_two_files_are_left_for_each_client(files: int, share: int) -> None:
    assert share_of_clients(files) == share
    assert share_of_gateways(files) == max(1, share // 4)


def test_a_process_that_gets_its_threads_may_begin_and_keeps_none_of_them() -> None:
    before = threading.active_count()
    check_threads()
    assert threading.active_count() == before


def test_a_process_that_gets_too_few_threads_is_told_what_to_raise() -> None:
    before, left = threading.active_count(), [THREADS - 1]

    def start(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        thread.start()

    with pytest.raises(ConfigError, match=r"ulimit -u"):
        check_threads(start)
    assert threading.active_count() == before
