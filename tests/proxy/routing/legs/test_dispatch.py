"""What an attempt holds is given back, wherever it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from ppd.proxy.assembly import Proxy, assemble
from ppd.proxy.config import ProxyConfig
from ppd.proxy.failures import Leg
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.ledger import LegEstimates
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.routing.attempt import Attempt
from ppd.proxy.routing.legs.dispatch import Dispatcher
from ppd.proxy.settings import Settings
from tests.proxy.routing.legs.one_pair import GOOD_D, WHOLE, http
from tests.support.attempts import decision, running

PROMPT_TOKENS = 100


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    made = assemble(Settings(ProxyConfig(heartbeat_port=0)))
    yield made
    await made.handoff_release.close()
    await made.upstream.close()
    made.listener.close()


def dispatcher(proxy: Proxy) -> Dispatcher:
    return Dispatcher(proxy.settings.config, proxy.upstream, proxy.handoff_release, proxy.state, proxy.bodies)


def split(proxy: Proxy, connector: str, prefill: str = "p:1") -> Attempt:
    def joined(role: Role, address: str) -> WorkerView:
        worker = Worker(role=role, address=address, models=("m",), connector=connector)
        proxy.state.registry.add_static(worker, 0.0)
        view = proxy.state.registry.view(worker.id)
        assert view is not None
        return view

    p, d = joined(Role.PREFILL, prefill), joined(Role.DECODE, "d:1")
    made = running(decision(Leg.DECODE, p, d))
    made.booking = LegBooking(
        proxy.state.registry,
        d.id,
        p.id,
        LegEstimates(prompt_tokens=PROMPT_TOKENS, new_tokens=1, new_on_prefill_tokens=PROMPT_TOKENS),
    )
    return made


def held(proxy: Proxy) -> list[tuple[int, int]]:
    """Legs in flight and tokens to compute, on P and on D."""
    return [(view.inflight, view.queued_prefill_tokens) for view in proxy.state.registry.views()]


async def test_a_hand_over_whose_client_left_holds_its_places_until_it_is_wound_up(proxy: Proxy) -> None:
    asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    made = split(proxy, "nixl", f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    turn = asyncio.ensure_future(dispatcher(proxy).open(made))
    await asked.wait()
    turn.cancel()
    await asyncio.wait({turn})
    assert held(proxy) == [(1, PROMPT_TOKENS), (1, 0)]
    await proxy.handoff_release.close()
    assert held(proxy) == [(0, 0), (0, 0)]
    server.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_counts_as_computed_with_the_first_event_and_a_whole_answer_gives_all_back_at_once(
    proxy: Proxy, stream: bool
) -> None:
    said = GOOD_D if stream else http(msgspec.json.encode(WHOLE))
    asked = asyncio.Event()
    may_answer = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await may_answer.wait()
        writer.write(said)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    registry, address = proxy.state.registry, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    worker = Worker(role=Role.DECODE, address=address, models=("m",))
    registry.add_static(worker, 0.0)
    view = registry.view(worker.id)
    assert view is not None
    made = running(decision(Leg.LOCAL, decode=view), stream=stream)
    made.booking = LegBooking(registry, view.id, None, LegEstimates(prompt_tokens=200, new_tokens=PROMPT_TOKENS))
    turn = asyncio.ensure_future(dispatcher(proxy).open(made))
    await asked.wait()
    assert held(proxy) == [(1, PROMPT_TOKENS)]
    may_answer.set()
    await turn
    assert held(proxy) == [(1, 0 if stream else PROMPT_TOKENS)]
    made.close()
    assert held(proxy) == [(0, 0)]
    server.close()
