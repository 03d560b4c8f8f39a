"""What a turn gains and loses where both legs run at once: its time to first token, and how soon a failure ends both.

    python -m benchmarks.turns.both_legs --turns 300

A P and a D that take as long as they are told, behind real sockets in one process with the proxy. They pair by
SGLang's room: D's first event comes once its own time is over and P has computed the prompt. Each turn has times of
its own. Each leg is also asked alone, without the proxy; so is an R, with D's time, to see what any turn takes in the
proxy. Then P fails, and D, after a time of their own: by an answer, or with their connection. What is told is the time
until the other one's connection is closed.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import click

from ppd.offline.experiment.statistics import percentile
from ppd.proxy.config import LogLevel, Mode, ProxyConfig
from ppd.proxy.policy import Route

from ..small.proxy_here import serving

LONGEST_S = 0.05  # of a leg
REPLICA = Route.REPLICA
_KEY = "an admin key for this program"
SETTLE_S = 0.002  # for connections to be closed behind a turn, before the next
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
    computed: asyncio.Event = field(default_factory=asyncio.Event)  # P has
    failed_s: float = 0.0  # when it did
    closed: asyncio.Future[float] = field(default_factory=asyncio.Future)  # when the other leg's connection was


class Engine:
    """P, D or R, which is as D alone. One turn at a time: `plan` is the current one's."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.plan = LegTimes(0.0, 0.0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path, _ = head.decode("latin-1").split(" ", 2)
                length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                if method == "GET":
                    _write(writer, "200 OK", '{"data": [{"id": "m"}]}' if path == "/v1/models" else "{}")
                elif not await self._leg(self.plan, reader, writer):
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
            await asyncio.wait({gone})

    async def _answer(self, plan: LegTimes, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(plan.prefill_s if self.role == "P" else plan.decode_s)
        if plan.fails == self.role:
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
            _write(writer, "200 OK", _WHOLE)
            return True
        if self.role == "D" and not plan.is_alone:
            await plan.computed.wait()
        writer.write((_HEAD % ("200 OK", "text/event-stream", "Transfer-Encoding: chunked")).encode())
        for part in _STREAM:
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        writer.write(b"0\r\n\r\n")
        return True


def _write(writer: asyncio.StreamWriter, status: str, body: str) -> None:
    writer.write((_HEAD % (status, "application/json", f"Content-Length: {len(body)}") + body).encode())


@dataclass(slots=True)
class Rig:
    """The proxy, the two engines, and a client that asks any of them."""

    engines: Sequence[Engine]
    addresses: Sequence[str]  # P's, D's and R's
    base_url: str
    session: aiohttp.ClientSession

    async def first_byte_s(self, url: str, plan: LegTimes, route: Route = Route.SPLIT) -> float:
        """Until the first byte of the answer's body; its connection is used again."""
        for engine in self.engines:
            engine.plan = plan
        body = {"model": "m", "messages": [{"role": "user", "content": random.randbytes(8).hex()}], "stream": True}
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

    async def closed_s(self, plan: LegTimes) -> float:
        """From the failure of one leg until the other's connection is closed."""
        await self.turn_s(plan)
        closed_s = await asyncio.wait_for(plan.closed, 10)
        return closed_s - plan.failed_s


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        engines, addresses = [Engine(role) for role in "PDR"], list[str]()
        for engine in engines:
            server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
            stack.callback(server.close)
            addresses.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        config = ProxyConfig(
            port=0,
            heartbeat_port=0,
            workers=tuple(f"{one.role}={at},engine=sglang" for one, at in zip(engines, addresses, strict=True)),
            admin_key=_KEY,
            mode=Mode.ALWAYS_SPLIT,
            attempts=1,
            breaker_failures=1_000_000,
            canary_interval_s=1e6,
            log_level=LogLevel.ERROR,
        )
        base_url = await stack.enter_async_context(serving(config))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Rig(engines, addresses, base_url, session)


async def measure(turns: int, seed: int) -> dict[str, list[float]]:
    """Seconds, by what they are of."""
    rng, found = random.Random(seed), dict[str, list[float]]()
    async with rig() as made:
        await made.turn_s(LegTimes(0.0, 0.0))
        for _ in range(turns):
            prefill_s, decode_s = rng.uniform(0, LONGEST_S), rng.uniform(0, LONGEST_S)
            alone = [await made.alone_s(at, prefill_s, decode_s) for at in (0, 1)]
            both_s = await made.turn_s(LegTimes(prefill_s, decode_s))
            lone_s = await made.alone_s(2, 0.0, decode_s)
            row = {
                "P alone": alone[0],
                "D alone": alone[1],
                "both, through the proxy": both_s,
                "both, more than the slower one alone": both_s - max(alone),
                "R through the proxy, more than R alone": await made.turn_s(LegTimes(0.0, decode_s), REPLICA) - lone_s,
            }
            for name, took_s in row.items():
                found.setdefault(name, []).append(took_s)
        for role, how in (("P", "answer"), ("P", "reset"), ("D", "answer"), ("D", "reset")):
            name = f"{role} fails ({'500' if how == 'answer' else how}), until {'PD'[role == 'P']}'s leg is closed"
            for _ in range(turns):
                plan = LegTimes(rng.uniform(0, LONGEST_S / 5), rng.uniform(0, LONGEST_S / 5), role, how)
                found.setdefault(name, []).append(await made.closed_s(plan))
                await asyncio.sleep(SETTLE_S)
    return found


def table(found: dict[str, list[float]]) -> Iterable[str]:
    yield "| ms | median | p99 |\n| --- | --- | --- |"
    for name, times in found.items():
        yield f"| {name} | {percentile(times, 0.5) * 1e3:.2f} | {percentile(times, 0.99) * 1e3:.2f} |"


@click.command(help=__doc__)
@click.option("--turns", default=300, show_default=True, help="For each line.")
@click.option("--seed", default=0, show_default=True)
def main(turns: int, seed: int) -> None:
    for line in table(asyncio.run(measure(turns, seed))):
        click.echo(line)


if __name__ == "__main__":
    main()
