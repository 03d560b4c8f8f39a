from __future__ import annotations

import resource
import sys
from collections.abc import Iterator

import pytest

from ppd.proxy.runtime.process_limits import (
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


@pytest.mark.parametrize(("files", "share"), [(1024, 298), (431, 101), (430, 100), (134, 2), (128, 1), (20, 1)])
def test_two_files_are_left_for_each_client(files: int, share: int) -> None:
    assert share_of_clients(files) == share
    assert share_of_gateways(files) == max(1, share // 4)
