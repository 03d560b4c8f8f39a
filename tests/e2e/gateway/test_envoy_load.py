"""200 turns a second for half a minute through Envoy, picker and sidecars: all answered, right, and nothing is left."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from benchmarks.soak.oracle import running_oracle
from ppd.proxy.config import Mode
from ppd.proxy.openai.request import Endpoint
from ppd.servers.fleet.ports import free_ports
from tests.e2e.gateway.envoy_program import carried
from tests.support.fleet import Fleet, has_work
from tests.support.proxy import ProxyClient

pytestmark = pytest.mark.alone

RATE, SECONDS = 200.0, 30.0
AT_ONCE, TURNS = 100, 4  # conversations, and turns of each
LIMIT_S = 120.0  # of anything that is waited for
SAID = "Tell me of a thing that lasts for long. " * 12
# Where the machine is too slow for this rate, turns come late, and none is refused.
PATIENT: dict[str, Any] = {"queue_wait_s": 0.0, "queue_timeout_s": LIMIT_S, "queue_limit": 10_000}


@asynccontextmanager
async def program(session: aiohttp.ClientSession, port: int, *argv: str) -> AsyncIterator[str]:
    """The address of `python -m ARGV`, once it is healthy."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", *argv, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(LIMIT_S):
            while not await is_healthy(session, port):
                assert process.returncode is None
                await asyncio.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def is_healthy(session: aiohttp.ClientSession, port: int) -> bool:
    try:
        async with session.get(f"http://127.0.0.1:{port}/health") as answer:
            return answer.status == 200
    except aiohttp.ClientConnectionError:
        return False


async def join(fleet: Fleet, stack: AsyncExitStack, name: str) -> str:
    """A worker of processes of its own: an engine, and a sidecar before it unless it is P. Returns the engine's."""
    role = name[0]
    port, before = free_ports(2)
    run = partial(program, fleet.session)
    flags = ("--port", str(port), "--role", role, "--time-scale", "0")
    engine = address = await stack.enter_async_context(run(port, "ppd.servers.sim", *flags))
    if role != "P":
        reports = f"127.0.0.1:{fleet.proxy.settings.config.heartbeat_port}"
        where = ("--engine", f"http://{engine}", "--listen", f"127.0.0.1:{before}", "--report", reports)
        argv = ("sidecar", *where, "--allow-prefill", "127.0.0.1/32")
        address = await stack.enter_async_context(run(before, "ppd.servers", *argv))
    status, _ = await fleet.admin("POST", "/workers", {"worker": f"{role}={address},connector=nixl"})
    assert status == 201
    await fleet.until(lambda: fleet.states().get(name) == "up", LIMIT_S)
    return engine


@dataclass
class Conversation:
    """Every second one streams."""

    number: int
    envoy: ProxyClient
    turns: list[tuple[dict[str, Any], int, str, str]] = field(default_factory=list)  # body, status, route, text

    async def run(self, began_s: float) -> None:
        """Each turn when it is due, or as soon as the one before is answered."""
        group, place = divmod(self.number, AT_ONCE)
        messages: list[dict[str, str]] = []
        for turn in range(TURNS):
            due_s = began_s + ((group * TURNS + turn) * AT_ONCE + place) / RATE
            await asyncio.sleep(due_s - asyncio.get_running_loop().time())
            messages.append({"role": "user", "content": f"{self.number}, {turn}: {SAID}"})
            messages.append({"role": "assistant", "content": await self._ask(list(messages))})

    async def _ask(self, messages: list[dict[str, str]]) -> str:
        body = {"model": "sim", "messages": messages, "max_tokens": 8, "stream": self.number % 2 == 1}
        async with self.envoy.session.post(f"{self.envoy.base_url}/v1/chat/completions", json=body) as answer:
            text = said(await answer.read()) if answer.status == 200 else ""
            self.turns.append((body, answer.status, answer.headers.get("x-ppd-route", ""), text))
            return text


def said(answer: bytes) -> str:
    """The text of a whole answer, or of a stream that has its end."""
    if not answer.startswith(b"data: "):
        return str(msgspec.json.decode(answer)["choices"][0]["message"]["content"])
    *events, done = [line.removeprefix(b"data: ") for line in answer.split(b"\n\n") if line]
    assert done == b"[DONE]"
    choices = [choice for event in events for choice in msgspec.json.decode(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_every_turn_is_answered_right_and_nothing_is_left(tmp_path: Path) -> None:
    (admin,) = free_ports(1)
    settings = {"mode": Mode.TABLE, **PATIENT}
    async with (
        AsyncExitStack() as stack,
        carried(tmp_path, "", options={"admin_port": admin}, **settings) as (fleet, envoy),
    ):
        engines = {name: await join(fleet, stack, name) for name in ("P1", "D1", "R1")}
        count = round(RATE * SECONDS / TURNS)
        conversations = [Conversation(number, envoy) for number in range(count)]
        began_s = asyncio.get_running_loop().time()
        async with asyncio.timeout(SECONDS + LIMIT_S):
            await asyncio.gather(*(one.run(began_s) for one in conversations))
        turns = [turn for one in conversations for turn in one.turns]
        told = Counter((status, route) for _, status, route, _ in turns)
        assert {status for status, _ in told} == {200}
        assert {route for _, route in told} >= {"SPLIT", "LOCAL"}  # R is for when D is busy, as on slow machines
        assert told.total() == RATE * SECONDS
        await nothing_is_left(fleet, admin, engines)
        assert Counter(one.outcome for one in fleet.proxy.state.receipts.newest(10_000)) == {"completed": len(turns)}
    async with running_oracle() as oracle:
        for body, _, _, text in turns:
            assert {0: text} == await oracle.texts(Endpoint.CHAT, body)


async def nothing_is_left(fleet: Fleet, admin: int, engines: dict[str, str]) -> None:
    """In the picker's books, between Envoy and the picker, and on the engines."""
    state = fleet.proxy.state
    await fleet.until(lambda: all(one.outcome != "running" for one in state.receipts.newest(10_000)), LIMIT_S)
    assert not any(map(has_work, state.registry.views()))
    assert not state.admission.inside and not fleet.proxy.body_memory.held_bytes
    async with fleet.session.get(f"http://127.0.0.1:{admin}/clusters") as answer:
        active = re.findall(r"^picker::127\S+::rq_active::(\d+)$", await answer.text(), re.MULTILINE)
    assert active == ["0"]
    for engine in engines.values():
        async with fleet.session.get(f"http://{engine}/metrics") as answer:
            text = await answer.text()
        used = re.findall(r"^vllm:(?:kv_cache_usage_perc|num_requests_\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
        assert len(used) >= 3 and not any(map(float, used)), text
