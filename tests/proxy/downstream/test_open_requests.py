"""All requests under way: which are refused by their heads, and how a drain ends them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ppd.proxy.config import ProxyConfig
from ppd.proxy.downstream.limits import CUT_S, OpenRequests
from ppd.proxy.errors import RequestError
from ppd.proxy.runtime.tasks import Drain, draining
from ppd.proxy.telemetry.access_log import AccessLog, AccessRecord
from tests.proxy.telemetry.test_access_log import Kept
from tests.support.clock import scenario

TURN, LIMIT_S = "/v1/chat/completions", 30.0


class Connection:
    """Knows which of its requests have ended, and how."""

    def __init__(self) -> None:
        self.ends: list[bool] = []

    def began(self, request: object) -> None: ...

    def ended(self, request: object, *, left: bool) -> None:
        self.ends.append(left)


class Exchange:
    """A request that begins at once. ends: when it is cut."""

    def __init__(self, requests: OpenRequests, drain: Drain, *, ends: bool = True) -> None:
        self.is_draining = False
        self.record: AccessRecord | None = requests.opened("POST", TURN)
        self.was_cut = False
        self.connection: Any = Connection()
        self._requests, self._drain, self._ends = requests, drain, ends
        requests.began(self, self.connection)  # type: ignore[arg-type]

    def end(self, *, left: bool = False) -> None:
        self._requests.ended(self, self.connection, left=left)  # type: ignore[arg-type]

    def cut(self) -> None:
        assert self._drain.is_cut, "who looks must see that it is not its client that ends it"
        self.was_cut = True
        if self._ends:
            self.end(left=True)


@pytest.mark.parametrize(
    ("path", "is_refused"), [(TURN, True), ("/v1/models", True), ("/health", False), ("/metrics", False)]
)
def test_once_a_drain_has_begun_only_operators_are_answered(path: str, is_refused: bool) -> None:
    drain = Drain()
    requests = OpenRequests(ProxyConfig(), drain)
    drain.announce()
    assert requests.refusal(path, path.encode(), [], read_bytes=100) is None
    drain.begin()
    error = requests.refusal(path, path.encode(), [], read_bytes=100)
    assert (error is not None) == is_refused
    if error is not None:
        assert (error.status, error.message, error.code) == (503, draining().message, "draining")


LINE = (b"name", b"value")  # of 13 bytes, as it is counted


@pytest.mark.parametrize(
    ("target", "lines", "read_bytes", "status"),
    [
        (b"/a", [LINE] * 10, None, None),
        (b"/a", [LINE] * 11, None, 431),
        (b"/" + b"a" * 199, [], None, None),
        (b"/" + b"a" * 200, [], None, 431),
        (b"/" + b"a" * 186, [LINE], 201, None),  # with part of the body, say
        (b"/" + b"a" * 187, [LINE], 201, 431),
        (b"/" + b"a" * 187, [LINE], 200, None),  # the reads tell that it is not larger
        (b"a", [], 10, 400),
        (b"/\xe9", [], 10, 400),
        (b"/a", [(b"name", b"a\0b")], None, 400),
        (b"/a", [(b"name", b"a\0b")], 10, None),  # its parser would have said so
    ],
)
def test_a_head_has_limits(
    target: bytes, lines: list[tuple[bytes, bytes]], read_bytes: int | None, status: int | None
) -> None:
    requests = OpenRequests(ProxyConfig(header_limit=10, head_limit_bytes=200), Drain())
    error = requests.refusal("/a", target, lines, read_bytes=read_bytes)
    assert (error and error.status) == status
    assert error is None or isinstance(error, RequestError)


@scenario
async def test_a_drain_waits_for_answers_whose_connections_then_close() -> None:
    drain = Drain()
    requests = OpenRequests(ProxyConfig(), drain)
    before = Exchange(requests, drain)
    assert not before.is_draining
    drain.begin()
    drained = asyncio.create_task(requests.drained(LIMIT_S))
    await asyncio.sleep(1.0)
    late = Exchange(requests, drain)
    assert before.is_draining and late.is_draining
    before.end()
    late.end()
    last = Exchange(requests, drain)  # before the drain has seen that there was none
    await asyncio.sleep(1.0)
    assert not drained.done()
    last.end()
    await drained
    assert not drain.is_cut and not before.was_cut and not last.was_cut
    assert before.connection.ends == last.connection.ends == [False]


@pytest.mark.parametrize(("ends", "cut_s"), [(True, 0.0), (False, CUT_S)])
def test_a_drain_cuts_answers_that_last_too_long(ends: bool, cut_s: float) -> None:
    """It does not wait for a client that takes nothing."""

    @scenario
    async def work() -> None:
        drain, time = Drain(), asyncio.get_running_loop().time
        requests = OpenRequests(ProxyConfig(), drain)
        last = [Exchange(requests, drain, ends=ends) for _ in range(2)]
        begun_s = time()
        await requests.drained(LIMIT_S)
        assert [one.was_cut for one in last] == [True, True]
        assert time() - begun_s == LIMIT_S + cut_s

    work()


@pytest.mark.parametrize(
    ("left", "is_cut", "outcome"),
    [(False, False, "completed"), (False, True, "completed"), (True, False, "left"), (True, True, "cut")],
)
def test_the_access_log_tells_how_a_request_ended(left: bool, is_cut: bool, outcome: str) -> None:
    drain, kept = Drain(), Kept()
    requests = OpenRequests(ProxyConfig(), drain, AccessLog(as_json=True, lines=kept))
    exchange = Exchange(requests, drain)
    drain.is_cut = is_cut
    exchange.end(left=left)
    requests.refused("GET", "/a", 431)
    ended, refused = (json.loads(line) for line in kept.lines)
    assert (ended["path"], ended["outcome"]) == (TURN, outcome)
    assert (refused["path"], refused["status"], refused["outcome"]) == ("/a", 431, "rejected")
