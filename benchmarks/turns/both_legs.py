"""What a turn gains and loses where both legs run at once: its time to first token, and how soon a failure ends both.

    python -m benchmarks.turns.both_legs --turns 300

A P and a D that take as long as they are told, and a client of one turn after the other, in this process; the proxy in
one of its own, as `ppd serve` starts it. The engines pair by SGLang's room: D's first event comes once its own time is
over and P has computed the prompt. Each turn has times of its own. Each leg is also asked alone, without the proxy, and
so are both at once: engines of one process keep each other waiting, and that is none of the proxy's. An R is asked with
D's time, to see what any turn takes in the proxy. Then P fails, and D, after a time of their own: by an answer, or with
their connection. What is told is the time until the other one's connection is closed.

Legs that take long leave the proxy's code and data in no cache of the processor: compare `--longest-ms 1`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import click

from ppd.offline.experiment.statistics import percentile
from ppd.proxy.policy import Route
from ppd.proxy.runtime.process import new_loop
from ppd.servers.fleet.ports import HOST, free_ports
from ppd.servers.fleet.process import EngineProcess
from ppd.servers.vllm.launch import Launch

LONGEST_S = 0.05
STEP_S = 0.005  # from the first token to the last
REPLICA = Route.REPLICA
_KEY = "an admin key for this program"
_STARTS_S = 30.0
_HEAD = "HTTP/1.1 %s\r\nContent-Type: %s\r\n%s\r\n\r\n"
_EVENT = 'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":%s}]}\n\n'
_STREAM = (_EVENT % "null").encode(), (_EVENT % '"stop"' + "data: [DONE]\n\n").encode()
_MESSAGE = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "length"}
_WHOLE = json.dumps({"id": "x", "object": "chat.completion", "choices": [_MESSAGE]})
_ERROR = json.dumps({"error": {"message": "no", "type": "x", "param": None, "code": 500}})


@dataclass(slots=True)
class LegTimes:
    """What the legs of one turn do. fails: P, D or nobody; how: `answer` (a 500) or `reset`."""

    prefill_s: float
    decode_s: float
    fails: str = ""
    how: str = "answer"
    is_alone: bool = False  # nobody waits for the other leg
    asked: set[str] = field(default_factory=set)
    both_asked: asyncio.Event = field(default_factory=asyncio.Event)
    computed: asyncio.Event = field(default_factory=asyncio.Event)  # P has
    failed_s: float = 0.0  # when it did
    closed: asyncio.Future[float] = field(default_factory=asyncio.Future)  # when the other leg's connection was


class Engine:
    """P, D or R, which is as D alone. plans: of the turns under way, by their prompt."""

    def __init__(self, role: str, plans: Mapping[str, LegTimes]) -> None:
        self.role = role
        self._plans = plans

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path, _ = head.decode("latin-1").split(" ", 2)
                length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
                body = await reader.readexactly(int(length or 0))
                if method == "GET":
                    _write(writer, "200 OK", '{"data": [{"id": "m"}]}' if path == "/v1/models" else "{}")
                elif not await self._leg(self._plans[json.loads(body)["messages"][0]["content"]], reader, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _leg(self, plan: LegTimes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        working = asyncio.ensure_future(self._answer(plan, writer))
        gone = asyncio.ensure_future(reader.read(1))  # the proxy sends nothing more before it has an answer
        try:
            await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and plan.fails not in ("", self.role) and self.role != "R" and not plan.closed.done():
                plan.closed.set_result(time.perf_counter())
            return working.done() and working.result()
        finally:
            working.cancel()
            gone.cancel()
            await asyncio.gather(gone, working, return_exceptions=True)

    async def _answer(self, plan: LegTimes, writer: asyncio.StreamWriter) -> bool:
        plan.asked.add(self.role)
        if len(plan.asked) == 2:
            plan.both_asked.set()
        await asyncio.sleep(plan.prefill_s if self.role == "P" else plan.decode_s)
        if plan.fails == self.role:
            await plan.both_asked.wait()
            plan.failed_s = time.perf_counter()
            if plan.how == "reset":
                writer.transport.abort()
                return False
            _write(writer, "500 Internal Server Error", _ERROR)
            return True
        if plan.fails and self.role != "R":  # which answers the turn in the end
            await asyncio.Event().wait()  # until it is closed
        if self.role == "P":
            plan.computed.set()
            # D's first event leaves first: on a machine of its own it would not wait until this answer is written.
            await asyncio.sleep(0)
            _write(writer, "200 OK", _WHOLE)
            return True
        if self.role == "D" and not plan.is_alone:
            await plan.computed.wait()
        first, last = (b"%x\r\n%b\r\n" % (len(part), part) for part in _STREAM)
        writer.write((_HEAD % ("200 OK", "text/event-stream", "Transfer-Encoding: chunked")).encode() + first)
        await asyncio.sleep(STEP_S)
        writer.write(last + b"0\r\n\r\n")
        return True


def _write(writer: asyncio.StreamWriter, status: str, body: str) -> None:
    writer.write((_HEAD % (status, "application/json", f"Content-Length: {len(body)}") + body).encode())


@dataclass(slots=True)
class Rig:
    """The proxy, the two engines, and a client that asks any of them."""

    plans: dict[str, LegTimes]
    addresses: Sequence[str]  # P's, D's and R's
    base_url: str
    session: aiohttp.ClientSession

    async def first_byte_s(self, url: str, plan: LegTimes, route: Route = Route.SPLIT, prompt: str = "") -> float:
        """Until the first byte of the answer's body; its connection is used again. prompt: empty for a new one."""
        prompt = prompt or random.randbytes(8).hex()
        self.plans[prompt] = plan
        body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "stream": True}
        began = time.perf_counter()
        headers = {"X-Admin-Key": _KEY, "X-PPD-Force-Route": route}
        async with self.session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            await answer.content.readany()
            took_s = time.perf_counter() - began
            await answer.read()
        return took_s

    async def turn_s(self, plan: LegTimes, route: Route = Route.SPLIT) -> float:
        return await self.first_byte_s(self.base_url, plan, route)

    async def alone_s(self, at: int, prefill_s: float, decode_s: float) -> float:
        """Of P (0), D (1) or R (2), without the proxy."""
        plan = LegTimes(prefill_s, decode_s, is_alone=True)
        return await self.first_byte_s(f"http://{self.addresses[at]}", plan)

    async def pair_s(self, plan: LegTimes) -> float:
        """Of P and D at once, D a moment earlier, without the proxy: until D's first byte."""
        prompt = random.randbytes(8).hex()
        asking = [
            asyncio.create_task(self.first_byte_s(f"http://{self.addresses[at]}", plan, prompt=prompt)) for at in (1, 0)
        ]
        return (await asyncio.gather(*asking))[0]

    async def closed_s(self, plan: LegTimes) -> float:
        """From the failure of one leg until the other's connection is closed."""
        await self.turn_s(plan)
        closed_s = await asyncio.wait_for(plan.closed, 10)
        return closed_s - plan.failed_s


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        plans, addresses = dict[str, LegTimes](), list[str]()
        for role in "PDR":
            server = await asyncio.start_server(Engine(role, plans).serve, HOST, 0)
            stack.callback(server.close)
            addresses.append(f"{HOST}:{server.sockets[0].getsockname()[1]}")
        (port,) = free_ports(1)
        flags = {
            "port": port,
            "heartbeat-port": 0,
            "mode": "always_split",
            "attempts": 1,
            "breaker-failures": 1_000_000,
            "canary-interval-s": 0,
            "log-level": "error",
            "admin-key": _KEY,
        }
        workers = [f"--workers={role}={at},engine=sglang" for role, at in zip("PDR", addresses, strict=True)]
        argv = (sys.executable, "-m", "ppd.servers", "serve", *(f"--{key}={to}" for key, to in flags.items()), *workers)
        folder = stack.enter_context(TemporaryDirectory())
        proxy = EngineProcess(Launch(argv, {}), Path(folder) / "proxy.log", name="proxy")
        await stack.enter_async_context(proxy)
        await proxy.wait_healthy(f"http://{HOST}:{port}", timeout_s=_STARTS_S)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        made = Rig(plans, addresses, f"http://{HOST}:{port}", session)
        for route in (Route.SPLIT, REPLICA):
            await made.turn_s(LegTimes(0.0, 0.0), route)  # which waits until all are up
        yield made


Found = dict[str, list[float]]  # seconds, by what they are of


async def measure(turns: int, seed: int, longest_s: float = LONGEST_S) -> Found:
    """turns: for each row. longest_s: of a leg."""
    rng, found = random.Random(seed), Found()
    async with rig() as made:
        for _ in range(turns):
            prefill_s, decode_s = rng.uniform(0, longest_s), rng.uniform(0, longest_s)
            alone = [await made.alone_s(at, prefill_s, decode_s) for at in (0, 1)]
            pair_s = await made.pair_s(LegTimes(prefill_s, decode_s))
            both_s = await made.turn_s(LegTimes(prefill_s, decode_s))
            lone_s = await made.alone_s(2, 0.0, decode_s)
            row = {
                "P alone": alone[0],
                "D alone": alone[1],
                "both, through the proxy": both_s,
                "both, more than the slower one alone": both_s - max(alone),
                "both without the proxy, more than that one": pair_s - max(alone),
                "R through the proxy, more than R alone": await made.turn_s(LegTimes(0.0, decode_s), REPLICA) - lone_s,
            }
            for name, took_s in row.items():
                found.setdefault(name, []).append(took_s)
        for role, how in (("P", "answer"), ("P", "reset"), ("D", "answer"), ("D", "reset")):
            name = f"{role} fails ({'500' if how == 'answer' else how}), until {'PD'[role == 'P']}'s leg is closed"
            for _ in range(turns):
                plan = LegTimes(rng.uniform(0, longest_s / 5), rng.uniform(0, longest_s / 5), role, how)
                found.setdefault(name, []).append(await made.closed_s(plan))
    return found


def table(found: dict[str, list[float]]) -> Iterable[str]:
    yield "| ms | median | p99 |\n| --- | --- | --- |"
    for name, times in found.items():
        yield f"| {name} | {percentile(times, 0.5) * 1e3:.2f} | {percentile(times, 0.99) * 1e3:.2f} |"


@click.command(help=__doc__)
@click.option("--turns", default=300, show_default=True, help="For each line.")
@click.option("--longest-ms", default=1e3 * LONGEST_S, show_default=True, help="Of a leg.")
@click.option("--seed", default=0, show_default=True)
def main(turns: int, longest_ms: float, seed: int) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        found = runner.run(measure(turns, seed, longest_ms / 1e3))
    for line in table(found):
        click.echo(line)


if __name__ == "__main__":
    main()
