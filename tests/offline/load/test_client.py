from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from ppd.offline.load.client import allow_connections


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_as_far_as_is_needed(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    assert allow_connections(400) == ""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 400


def test_a_limit_that_suffices_is_left_alone(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    assert allow_connections(100) == ""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 256


def test_what_the_hard_limit_does_not_allow_is_said(limits: tuple[int, int]) -> None:
    if limits[1] == resource.RLIM_INFINITY:
        pytest.skip("there is no hard limit here")
    assert f"can be open (ulimit -Hn is {limits[1]})" in allow_connections(limits[1])
