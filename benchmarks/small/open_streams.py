"""What do thousands of open streams cost the proxy, and does each of them still get all of its answer in time?

    python -m benchmarks.small.open_streams                    # 5,000 streams, an event every 2 s on each
    python -m benchmarks.small.open_streams --streams 1000 --every 0.5

The proxy is a process of its own; this one is four workers and all the clients. Streams are opened evenly over
`--ramp` seconds from several addresses. Each event carries its number, so a lost, doubled or swapped event shows. An
event's delay is from the worker's write to the client's read. Meanwhile `/health` is asked ten times a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
from aiohttp import web

from ppd.servers.fleet.ports import free_ports
from ppd.servers.fleet.process import EngineProcess
from ppd.servers.vllm.launch import Launch

from ..overhead.processes import HOST, raise_descriptor_limit
from ..soak.fleet import rss_kib

WORKERS = 4
SOURCES = 8  # addresses of clients, as one may have only so many connections
EVENTS = 12
_STARTS_S = 30.0


@dataclass(slots=True)
class StreamsSeen:
    complete: int = 0
    wrong: list[str] = field(default_factory=list)  # what came of the others
    delays_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    rss_kib: dict[str, int] = field(default_factory=dict)  # when no stream was open, and when all were


class Worker:
    """Answers each chat request with `EVENTS` numbered events, one every `every_s`."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.open = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        name = msgspec.json.decode(await request.read())["messages"][0]["content"]
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self.open += 1
        try:
            for number in range(EVENTS):
                delta = {"content": f"{name}/{number}/{time.monotonic()} "}
                choice = {"index": 0, "delta": delta, "finish_reason": "stop" if number == EVENTS - 1 else None}
                event = {"id": name, "object": "chat.completion.chunk", "model": "m", "choices": [choice]}
                await answer.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
                await asyncio.sleep(self._every_s)
            await answer.write(b"data: [DONE]\n\n")
        finally:
            self.open -= 1
        return answer

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/health", lambda _: _empty())
        app.router.add_get("/v1/models", lambda _: _models())
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, HOST, 0, backlog=4096)
        await site.start()
        try:
            yield f"{HOST}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def _empty() -> web.Response:
    return web.Response()


async def _models() -> web.Response:
    return web.json_response({"data": [{"id": "m"}]})


async def stream(port: int, number: int, seen: StreamsSeen) -> None:
    name = f"stream-{number}"
    body = msgspec.json.encode({"model": "m", "stream": True, "messages": [{"role": "user", "content": name}]})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    try:
        source = (f"127.0.0.{2 + number % SOURCES}", 0)
        reader, writer = await asyncio.open_connection(HOST, port, local_addr=source)
        try:
            writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body)
            status = int((await reader.readline()).split()[1])
            came = 0
            while line := await reader.readline():
                if b'"content":"' not in line:
                    continue
                of, at, written_s = line.split(b'"content":"')[1].split(b" ")[0].decode().split("/")
                seen.delays_s.append(time.monotonic() - float(written_s))
                if (of, int(at)) != (name, came):
                    seen.wrong.append(f"{of}/{at} where {name}/{came} was due")
                    return
                came += 1
        finally:
            writer.close()
    except (OSError, IndexError, ValueError) as exc:
        seen.wrong.append(type(exc).__name__)
        return
    if came == EVENTS:
        seen.complete += 1
    else:
        seen.wrong.append(f"status {status}, {came} of {EVENTS} events")


async def ask_health(url: str, seen: StreamsSeen) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            asked_s = time.monotonic()
            async with session.get(f"{url}/health") as answer:
                await answer.read()
            seen.health_s.append(time.monotonic() - asked_s)
            await asyncio.sleep(0.1)


async def measure(streams: int, every_s: float, ramp_s: float, folder: Path) -> StreamsSeen:
    seen = StreamsSeen()
    raise_descriptor_limit()
    async with AsyncExitStack() as stack:
        workers = [Worker(every_s) for _ in range(WORKERS)]
        addresses = [await stack.enter_async_context(worker.serving()) for worker in workers]
        port = free_ports(1)[0]
        url = f"http://{HOST}:{port}"
        flags = ["--port", str(port), "--heartbeat-port", "0", "--max-inflight", str(2 * streams)]
        flags += ["--max-worker-inflight", str(streams)]
        flags += [item for address in addresses for item in ("--workers", f"R={address}")]
        argv = (sys.executable, "-m", "ppd.servers", "serve", *flags)
        proxy = await stack.enter_async_context(EngineProcess(Launch(argv, {}), folder / "proxy.log", name="proxy"))
        await proxy.wait_healthy(url, timeout_s=_STARTS_S)
        await _until_ready(url)
        pid = _proxy_pid(port)
        await stream(port, -1, seen)
        seen.rss_kib["idle"] = rss_kib(pid)
        asking = asyncio.create_task(ask_health(url, seen))
        running = []
        for number in range(streams):
            running.append(asyncio.create_task(stream(port, number, seen)))
            await asyncio.sleep(ramp_s / streams)
        seen.rss_kib[f"{sum(worker.open for worker in workers):,} open"] = rss_kib(pid)
        await asyncio.gather(*running)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
    return seen


async def _until_ready(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(200):
            async with session.get(f"{url}/ready") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.1)
    raise SystemExit("error: the proxy is not ready")


def _proxy_pid(port: int) -> int:
    """The process whose command line holds the port: its starter only passes it on."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            argv = (folder / "cmdline").read_bytes().split(b"\0")
            if argv[1:4] == [b"-m", b"ppd.servers", b"serve"] and str(port).encode() in argv:
                return int(folder.name)
    raise SystemExit("error: the proxy's process is gone")


def report(seen: StreamsSeen, streams: int) -> str:
    def milliseconds(values: Sequence[float]) -> str:
        return ", ".join(f"{1e3 * value:.0f}" for value in np.percentile(values, (50, 99, 100)))

    (_, idle), (when, full) = seen.rss_kib.items()
    lines = [
        "| | |",
        "|---|---|",
        f"| streams that got all of their answer, and no other | {seen.complete - 1:,} of {streams:,} |",
        f"| delay of an event, ms: p50, p99, most | {milliseconds(seen.delays_s)} |",
        f"| `/health`, ms: p50, p99, most | {milliseconds(seen.health_s)} |",
        f"| memory of the proxy, idle; with {when} | {idle / 1024:.0f} MiB; {full / 1024:.0f} MiB |",
    ]
    return "\n".join([*lines, *sorted(set(seen.wrong))[:10]])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.small.open_streams", description="What thousands of open streams cost the proxy."
    )
    parser.add_argument("--streams", type=int, default=5000)
    parser.add_argument("--every", type=float, default=2.0, help="s between two events of a stream")
    parser.add_argument("--ramp", type=float, default=15.0, help="s over which streams are opened")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seen = asyncio.run(measure(args.streams, args.every, args.ramp, Path(folder)))
    print(report(seen, args.streams))
    raise SystemExit(1 if seen.wrong or seen.complete != args.streams + 1 else 0)


if __name__ == "__main__":
    main()
