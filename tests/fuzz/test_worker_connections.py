"""Whatever an engine does on its connections, a turn gets its own answer, or an error where its own was spoiled.

Some clients leave meanwhile. Nothing may be left of any turn: no connection, no call, no work.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ppd.proxy.config import DataPlane
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.runtime.process import new_loop
from tests.fuzz.odd_engine import OddEngine, text_of
from tests.support.credentials import Authority
from tests.support.fleet import Fleet, has_work
from tests.tidy_loop import unheard

CONVERSATIONS, TURNS = 6, 6
LONG = "x" * 600_000
SEEDS = 3


@dataclass(frozen=True)
class Kind:
    data_plane: DataPlane
    is_tls: bool = False


KINDS = {
    "native": Kind(DataPlane.NATIVE),
    "direct": Kind(DataPlane.DIRECT),
    "TLS": Kind(DataPlane.NATIVE, is_tls=True),
}


@dataclass(frozen=True)
class Outcome:
    status: int
    text: str
    is_whole: bool
    data: bytes


async def asked(fleet: Fleet, turn: str, messages: list[dict[str, str]]) -> Outcome:
    is_stream, data, status = turn.endswith("s"), b"", 0
    body = {"user": turn, "model": "sim", "max_tokens": 99, "stream": is_stream, "messages": messages}
    try:
        async with fleet.session.post(f"{fleet.base_url}/v1/chat/completions", json=body) as response:
            status = response.status
            async for part in response.content.iter_any():
                data += part
    except aiohttp.ClientError:
        return Outcome(status, "", False, data)
    if status != 200:
        return Outcome(status, "", "error" in json.loads(data), data)
    if not is_stream:
        return Outcome(status, json.loads(data)["choices"][0]["message"]["content"], True, data)
    found = [json.loads(line) for line in re.findall(rb"^data: (\{.*\})$", data, re.M)]
    text = "".join(each["choices"][0]["delta"].get("content", "") for each in found if each.get("choices"))
    return Outcome(status, text, b"data: [DONE]" in data and b'"error"' not in data, data)


def check(engine: OddEngine, turn: str, outcome: Outcome) -> None:
    where = (engine.seed, turn, outcome, engine.did[turn])
    assert b"stray" not in outcome.data, where
    assert {*re.findall(rb"turn-[0-9]+-[0-9]+[sw]", outcome.data)} <= {turn.encode()}, where
    if outcome.status == 200 and outcome.is_whole:
        assert outcome.text == text_of(turn), where
    else:
        assert turn in engine.broken, where
        assert text_of(turn).startswith(outcome.text), where


async def unless_left(asking: Coroutine[Any, Any, Outcome], rounds: int) -> Outcome | None:
    """None where the client has left, after so many rounds of the event loop; beyond 30 it stays."""
    task = asyncio.create_task(asking)
    for _ in range(rounds if rounds < 30 else 0):
        await asyncio.sleep(0)
    if rounds < 30:
        task.cancel()
    await asyncio.wait({task})
    return None if task.cancelled() else task.result()


async def converse(fleet: Fleet, engine: OddEngine, number: int) -> None:
    messages: list[dict[str, str]] = []
    for at in range(TURNS):
        turn = f"turn-{number}-{at}" + "sw"[(engine.seed + number + at) % 2]
        content = f"{turn} of {engine.seed} " + (LONG if (engine.seed + number * 3 + at) % 7 == 0 else "")
        asking = asked(fleet, turn, [*messages, {"role": "user", "content": content}])
        outcome = await unless_left(asking, (engine.seed * 31 + number * 7 + at) % 150)
        if outcome is None:
            continue
        check(engine, turn, outcome)
        if outcome.status == 200 and outcome.is_whole:
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": outcome.text}]


def left(fleet: Fleet, engine: OddEngine) -> dict[str, Any]:
    """What should be nothing once all turns are over."""
    upstream = fleet.proxy.upstream
    pools = [pool for (address, _), pool in upstream._pools.items() if address == engine.address]
    return {
        "connections in use": sum(pool._open - len(pool._idle) for pool in pools),
        "connections that the engine alone has": len(engine.links) - sum(pool._open for pool in pools),
        "calls": len(upstream._calls.get(WorkerId(engine.address), ())),
        "work": sum(has_work(view) for view in fleet.proxy.state.registry.views()),
    }


@asynccontextmanager
async def fleet_of(kind: Kind, folder: Path) -> AsyncIterator[tuple[Fleet, ssl.SSLContext | None]]:
    context, settings = None, dict[str, Any]()
    if kind.is_tls:
        authority = Authority(folder)
        own = authority.issue("engine")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(own.cert, own.key)
        settings["worker_ca_file"] = authority.ca
    async with Fleet.of(
        data_plane=kind.data_plane, breaker_failures=10**6, poison_s=0.0, retry_burst=10**6, **settings
    ) as fleet:
        yield fleet, context


async def play(fleet: Fleet, context: ssl.SSLContext | None, seed: int) -> OddEngine:
    engine = OddEngine(seed, context)
    try:
        worker = f"D={engine.address},model=sim" + (",tls=true" if context else "")
        await fleet.admin("POST", "/workers", {"worker": worker})
        await fleet.until(
            lambda: any(view.id == engine.address and view.up for view in fleet.proxy.state.registry.views())
        )
        async with asyncio.timeout(60):
            await asyncio.gather(*(converse(fleet, engine, number) for number in range(CONVERSATIONS)))
        await fleet.until(lambda: not any(left(fleet, engine).values()), 20)
        assert engine.misuses == [], (seed, engine.misuses)
        return engine
    except TimeoutError:
        raise AssertionError((seed, left(fleet, engine))) from None
    finally:
        await fleet.admin("DELETE", f"/workers/{engine.address}")
        await engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_gets_its_own_answer_or_an_error(kind: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with fleet_of(KINDS[kind], tmp_path) as (fleet, context):
            engines = [await play(fleet, context, seed) for seed in range(SEEDS)]
        spoiled = sum(len(engine.broken) for engine in engines)
        assert 0 < spoiled < sum(len(engine.asked) for engine in engines), "some answers, and not all"

    is_uvloop = KINDS[kind] != Kind(DataPlane.NATIVE)
    with asyncio.Runner(loop_factory=new_loop if is_uvloop else None) as runner:
        runner.run(run())


def test_connections_that_come_as_the_engine_ends_are_closed() -> None:
    async def run() -> None:
        for seed in range(40):
            engine = OddEngine(seed)
            host, _, port = engine.address.partition(":")
            with ExitStack() as clients:
                for _ in range(3):
                    clients.enter_context(socket.create_connection((host, int(port))))
                    for _ in range(seed % 4):
                        await asyncio.sleep(0)
                await engine.close()

    with unheard() as said, asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())
    assert said == []
