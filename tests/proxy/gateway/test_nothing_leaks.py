"""Whatever fails in a picker after a turn was let in, its place in the fleet and its workers are given back."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from ppd.proxy.assembly import Proxy
from ppd.proxy.config import Mode
from ppd.proxy.gateway.picking import HEAD_MESSAGE_BYTES
from ppd.proxy.gateway.wire.grpc import GrpcStatus
from tests.proxy.gateway.envoy import D1, Envoy, chat, proxy_of, refused
from tests.proxy.gateway.test_shadowing import Watching


class Failing:
    """Another object, one of whose methods raises."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner = inner
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return self._raise if name == self._name else getattr(self._inner, name)

    def _raise(self, *_: Any, **__: Any) -> Any:
        raise ValueError("10.0.0.1 is secret")


def fails_at(where: str, name: str, proxy: Proxy) -> Proxy:
    if where == "chooser":
        return replace(proxy, chooser=Failing(proxy.chooser, name))  # type: ignore[arg-type]
    changes: dict[str, Any] = {where: Failing(getattr(proxy.state, where), name)}
    return replace(proxy, state=replace(proxy.state, **changes))


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("chooser", "choose"),
        ("chooser", "next_best"),  # another worker behind the chosen one
        ("engine_caches", "session_id"),  # the headers
        ("health", "asked"),  # the booking of the turn, when workers are booked already
    ],
)
async def test_a_turn_that_fails_here_gives_all_back(where: str, name: str) -> None:
    proxy = proxy_of(mode=Mode.ALWAYS_SPLIT, picker_fallbacks=1, max_inflight=1)
    envoy = Envoy(fails_at(where, name, proxy))
    await envoy.turn()
    status, _, body = refused(envoy.answers[-1])
    assert (status, body["error"]["message"]) == (500, "internal error")
    assert envoy.is_idle
    assert (envoy.receipt.outcome, envoy.receipt.status) == ("failed", 500)
    envoy.call.lost()
    after = Envoy(proxy)
    await after.turn()  # the one place is free
    assert len(after.answers) == 2
    after.call.lost()
    assert after.is_idle


@pytest.mark.parametrize("ends", ["half_closed", "lost"])
async def test_a_turn_that_waits_for_a_busy_worker_and_is_left_gives_all_back(ends: str) -> None:
    proxy = proxy_of((f"D={D1}",), mode=Mode.ALWAYS_LOCAL, max_worker_inflight=1)
    first, second = Envoy(proxy), Envoy(proxy)
    await first.turn()
    await second.turn(chat(seed=1))
    assert len(second.answers) == 1
    getattr(second.call, ends)()
    await second.settled()
    assert (proxy.state.admission.inside, proxy.state.admission.waiting) == (1, 0)
    first.call.lost()
    assert first.is_idle


@pytest.mark.parametrize(("where", "name"), [("chooser", "ruled"), ("health", "asked")])
async def test_a_shadow_that_fails_gives_all_back(where: str, name: str) -> None:
    proxy = proxy_of(max_inflight=1)
    envoy = Watching(fails_at(where, name, proxy))
    await envoy.asked()
    assert envoy.is_idle
    assert envoy.receipt.outcome == "failed"
    envoy.call.lost()
    after = Watching(proxy)
    await after.asked()
    assert proxy.state.admission.inside == 1
    after.call.lost()
    assert after.is_idle


@pytest.mark.parametrize("ends", ["half_closed", "lost"])
async def test_a_turn_that_is_left_before_it_is_decided_books_nothing(ends: str) -> None:
    envoy = Envoy(proxy_of())
    envoy.head()
    envoy.tell("request_body", body=chat(), end_of_stream=True)
    getattr(envoy.call, ends)()
    await envoy.settled()
    assert envoy.is_idle
    assert len(envoy.answers) == 1  # to the head
    assert not envoy.proxy.body_memory.held_bytes


@pytest.mark.parametrize("kind", [Envoy, Watching])
@pytest.mark.parametrize("broken", [b"\xff\xff", b""])  # no message, and one of no stage
async def test_a_turn_ends_where_the_picker_ends_its_call_though_the_gateway_leaves_it_open(
    kind: type[Envoy], broken: bytes
) -> None:
    envoy = kind(proxy_of())
    await (envoy.asked() if isinstance(envoy, Watching) else envoy.turn())
    assert not envoy.is_idle
    envoy.call.message(broken)
    assert envoy.status is not None
    assert envoy.is_idle
    assert envoy.receipt.outcome == "cancelled"


async def test_a_body_that_comes_twice_ends_its_turn() -> None:
    envoy = Envoy(proxy_of())
    await envoy.turn()
    envoy.tell("request_body", body=b"again")
    assert envoy.status is GrpcStatus.INVALID_ARGUMENT
    assert envoy.is_idle
    assert envoy.receipt.outcome == "cancelled"


@pytest.mark.parametrize("kind", [Envoy, Watching])
async def test_of_a_request_that_is_refused_nothing_is_kept_though_its_call_stays_open(kind: type[Envoy]) -> None:
    proxy, size = proxy_of(body_limit_bytes=1000), 50_000
    calls = []
    tracemalloc.start()
    try:
        for _ in range(20):
            calls.append(call := kind(proxy))
            await (call.asked(body=bytes(size)) if isinstance(call, Watching) else call.turn(bytes(size)))
            call.answers.clear()
        assert tracemalloc.get_traced_memory()[0] < 10 * size
    finally:
        tracemalloc.stop()


async def test_a_head_has_the_proxys_limit_and_what_is_told_beside_it_another() -> None:
    proxy = proxy_of(head_limit_bytes=1000)
    long, longer = Envoy(proxy), Envoy(proxy)
    long.head(headers={"x-long": "a" * 1000})
    assert refused(long.answers[-1])[0] == 431
    longer.head(metadata={"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": "a" * HEAD_MESSAGE_BYTES}})
    assert (longer.answers, longer.status) == ([], GrpcStatus.RESOURCE_EXHAUSTED)
