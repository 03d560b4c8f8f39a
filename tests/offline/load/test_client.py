from __future__ import annotations

import errno
import resource
import socket
from collections.abc import Iterator

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from ppd.offline.load.client import allow_connections, cause

KEY = ConnectionKey("h", 1, is_ssl=False, ssl=True, proxy=None, proxy_auth=None, proxy_headers_hash=None)


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


@pytest.mark.parametrize(
    ("exc", "told"),
    [
        (aiohttp.ClientConnectorError(KEY, OSError(errno.ECONNREFUSED, "to 10.0.0.5")), "Connection refused"),
        (aiohttp.ClientConnectorDNSError(KEY, socket.gaierror(-2, "Name or service not known")), "Name or service not"),
        (TimeoutError(), "no answer in time"),
        (aiohttp.ServerTimeoutError(), "no answer in time"),
        (aiohttp.ServerDisconnectedError(), "ServerDisconnectedError"),
    ],
)
def test_a_failure_is_told_without_addresses(exc: Exception, told: str) -> None:
    assert cause(exc).startswith(told)
