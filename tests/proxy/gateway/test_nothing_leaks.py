"""Whatever fails in a picker after a turn was let in, its place in the fleet and its workers are given back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ppd.proxy.assembly import Proxy
from ppd.proxy.config import Mode
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
