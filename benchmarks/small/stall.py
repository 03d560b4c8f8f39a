"""Does one request keep the others waiting? Hostile and merely large bodies, beside a steady load of small turns.

    python -m benchmarks.small.stall                     # or some kinds: --only "parts;tool calls"

A real `ppd serve` is before two workers: a simulated engine, which answers the steady turns, and a program that only
reads bodies and answers at once, to which the large ones go. So nothing but the proxy is shared. One kind of body at a
time is sent again and again, by a process of its own. Wait: how much longer a steady turn took than the median without
any large body. Gap: the same of `GET /health`, asked 100 times a second; its longest is the loop's longest pause.

    python -m benchmarks.small.stall --steps             # where other programs need the processors too

The proxy then runs in this process, without steady turns. Shown are the longest steps of its loop, in processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import uvloop
from aiohttp import web
from rich.console import Console

from ppd.offline.experiment.statistics import percentile
from ppd.proxy.assembly import assemble
from ppd.proxy.cli.table_view import columns
from ppd.proxy.config import Mode, ProxyConfig
from ppd.proxy.downstream.serve import listen, serve
from ppd.proxy.settings import Settings
from ppd.servers.fleet.ports import free_ports
from ppd.servers.fleet.process import EngineProcess
from ppd.servers.vllm.launch import Launch

from .large_bodies import ANSWER_MB, CHAT, KINDS, MIB, NONE, Kind

HOST = "127.0.0.1"
TURNS_PER_S, PROBES_PER_S = 50, 100
_STARTS_S = 60.0
_PAUSE_S = 0.25  # between two large bodies


# -- a worker that reads, and answers at once


def sink(port: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        body = await request.read()
        found = body.rfind(ANSWER_MB.encode(), -200) if len(body) < 1000 else -1
        content = "x" * (int(body[found:].split(b":")[1][:2]) * MIB if found >= 0 else 1)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": content},
            "text": content,
            "finish_reason": "stop",
        }
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        output = [{"type": "message", "content": [{"type": "output_text", "text": "x"}]}]
        return web.json_response(
            {"id": "x", "choices": [choice], "status": "completed", "output": output, "usage": usage}
        )

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "large"}]})

    app = web.Application(client_max_size=128 * MIB)
    app.add_routes([web.get("/health", health), web.get("/v1/models", models), web.post("/{path:.*}", answer)])
    web.run_app(app, host=HOST, port=port, print=None, access_log=None)


# -- who sends


def send_for(port: int, kind: Kind, seconds: float) -> None:
    """Sends one body after the other, once told to; prints what came of it."""
    body, statuses, longest_s = kind.body(), dict[int | str, int](), 0.0
    print("ready", flush=True)
    sys.stdin.readline()
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        began_s = time.monotonic()
        status = send(port, kind, body)
        statuses[status] = statuses.get(status, 0) + 1
        longest_s = max(longest_s, time.monotonic() - began_s)
        time.sleep(_PAUSE_S)
    answers = ", ".join(f"{count} x {status}" for status, count in statuses.items())
    print(f"{len(body) / 1e6:.1f}|{longest_s:.2f}|{answers}", flush=True)


def send(port: int, kind: Kind, body: bytes) -> int | str:
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # refused before it was read
            connection.request("POST", kind.path, body, {"Content-Type": kind.content_type})
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, http.client.HTTPException):
        return "broken off"
    finally:
        connection.close()


@dataclass(slots=True)
class Seen:
    turns_s: list[float] = field(default_factory=list)
    probes_s: list[float] = field(default_factory=list)
    failed: int = 0


async def steady(session: aiohttp.ClientSession, url: str, seconds: float) -> Seen:
    """Open loop: a turn that waits delays no other."""
    seen = Seen()

    async def turn(number: int) -> None:
        body = {"model": "sim", "messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": 1}
        began_s = time.perf_counter()
        async with session.post(url + CHAT, json=body) as response:
            await response.read()
            seen.failed += response.status != 200
        seen.turns_s.append(time.perf_counter() - began_s)

    async def probe(_: int) -> None:
        began_s = time.perf_counter()
        async with session.get(url + "/health") as response:
            await response.read()
        seen.probes_s.append(time.perf_counter() - began_s)

    async def paced(one: Callable[[int], object], per_s: float) -> None:
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number in range(int(seconds * per_s)):
                await asyncio.sleep(max(0.0, began_s + number / per_s - time.perf_counter()))
                tasks.create_task(one(number))  # type: ignore[arg-type]

    await asyncio.gather(paced(turn, TURNS_PER_S), paced(probe, PROBES_PER_S))
    return seen


async def beside(
    session: aiohttp.ClientSession, url: str, port: int, kind: Kind, seconds: float
) -> tuple[Seen, list[str]]:
    """What the steady turns saw, then the body's megabytes, its longest answer in seconds, and its answers."""
    if kind.name == NONE:
        return await steady(session, url, seconds), ["", "", ""]
    sender = await started_sender(port, kind, seconds)
    sending = asyncio.create_task(told_to_send(sender))
    return await steady(session, url, seconds), await sending


async def started_sender(port: int, kind: Kind, seconds: float) -> asyncio.subprocess.Process:
    """Once it has made its body."""
    argv = ("-m", "benchmarks.small.stall", "--send", kind.name, "--port", str(port), "--seconds", str(seconds))
    pipe = asyncio.subprocess.PIPE
    sender = await asyncio.create_subprocess_exec(sys.executable, *argv, stdin=pipe, stdout=pipe)
    assert sender.stdout is not None, "a pipe"
    await sender.stdout.readline()
    return sender


async def told_to_send(sender: asyncio.subprocess.Process) -> list[str]:
    """The body's megabytes, its longest answer in seconds, and its answers."""
    assert sender.stdin is not None and sender.stdout is not None, "both are pipes"
    sender.stdin.write(b"go\n")
    line = await sender.stdout.readline()
    await sender.wait()
    return line.decode().strip().split("|")


# -- the program


@asynccontextmanager
async def running(folder: Path, flags: list[str]) -> AsyncIterator[int]:
    port, engine_port, sink_port = free_ports(3)
    ppd = (sys.executable, "-m", "ppd.servers")
    programs = {
        "engine": (*ppd, "sim", "--role", "R", "--port", str(engine_port), "--time-scale", "0"),
        "sink": (sys.executable, "-m", "benchmarks.small.stall", "--sink", str(sink_port)),
        "proxy": (
            *(*ppd, "serve", "--port", str(port), "--heartbeat-port", "0", "--mode", "replica"),
            *("--workers", f"R={HOST}:{engine_port},model=sim", "--workers", f"R={HOST}:{sink_port},model=large"),
            *("--warm-up-s", "0", *flags),
        ),
    }
    running = [EngineProcess(Launch(argv, {}), folder / f"{name}.log", name=name) for name, argv in programs.items()]
    try:
        for process, at in zip(running, (engine_port, sink_port, port), strict=True):
            await process.start()
            await process.wait_healthy(f"http://{HOST}:{at}", timeout_s=_STARTS_S)
        await asyncio.sleep(2.0)  # until both workers have been probed
        yield port
    finally:
        for process in reversed(running):
            await process.stop()


async def steps(names: list[str], seconds: float) -> None:
    """The five longest steps of the proxy's loop beside each kind of body, in milliseconds of processor time."""
    (sink_port,) = free_ports(1)
    argv = (sys.executable, "-m", "benchmarks.small.stall", "--sink", str(sink_port))
    workers = (f"R={HOST}:{sink_port},model=large",)
    config = ProxyConfig(port=0, heartbeat_port=0, mode=Mode.REPLICA, workers=workers, warm_up_s=0.0)
    proxy, listening, stop = assemble(Settings(config)), listen(config), asyncio.Event()
    taken: list[float] = []

    async def tick() -> None:
        last_s = time.thread_time()
        while True:
            await asyncio.sleep(0.002)
            now_s = time.thread_time()
            taken.append(1e3 * (now_s - last_s))
            last_s = now_s

    with TemporaryDirectory() as folder:
        async with EngineProcess(Launch(argv, {}), Path(folder) / "sink.log", name="sink") as process:
            await process.wait_healthy(f"http://{HOST}:{sink_port}", timeout_s=_STARTS_S)
            serving, ticking = asyncio.create_task(serve(proxy, listening, stop)), asyncio.create_task(tick())
            await asyncio.sleep(2.0)  # until the worker has been probed
            port = listening.getsockname()[1]
            for kind in [kind for kind in KINDS if kind.name != NONE and (not names or kind.name in names)]:
                sender = await started_sender(port, kind, seconds)
                taken.clear()
                size, longest, answers = await told_to_send(sender)
                shown = " ".join(f"{ms:.0f}" for ms in sorted(taken)[-5:])
                print(kind.name, size, f"steps {shown} ms", f"longest {longest} s", answers, sep=" | ", flush=True)
            ticking.cancel()
            stop.set()
            await serving


async def measure(names: list[str], seconds: float, flags: list[str]) -> None:
    kinds = [kind for kind in KINDS if kind.name == NONE or not names or kind.name in names]
    rows: list[tuple[str, ...]] = [
        ("body", "MB", "wait p50", "p99", "max", "gap p99", "max", "failed", "longest", "answers")
    ]
    console = Console()
    with TemporaryDirectory() as folder:
        async with (
            running(Path(folder), flags) as port,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            url, usual_s, usual_probe_s = f"http://{HOST}:{port}", 0.0, 0.0
            await steady(session, url, 1.0)
            for kind in kinds:
                seen, line = await beside(session, url, port, kind, seconds)
                if kind.name == NONE:
                    usual_s, usual_probe_s = percentile(seen.turns_s, 0.5), percentile(seen.probes_s, 0.5)
                waits = [1e3 * (percentile(seen.turns_s, share) - usual_s) for share in (0.5, 0.99, 1.0)]
                gaps = [1e3 * (percentile(seen.probes_s, share) - usual_probe_s) for share in (0.99, 1.0)]
                size, longest, answers = line
                rows.append(
                    (kind.name, size, *(f"{ms:.1f}" for ms in (*waits, *gaps)), str(seen.failed), longest, answers)
                )
                print(*rows[-1], sep=" | ", flush=True)
    console.print("milliseconds, but the longest answer in seconds", highlight=False)
    console.print(columns(rows, right=range(1, 9)), soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.small.stall", description="How long large bodies keep small turns waiting."
    )
    parser.add_argument("--only", default="", help="names of kinds, separated by semicolons")
    parser.add_argument("--steps", action="store_true", help="the loop's longest steps, in processor time")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each kind")
    parser.add_argument("--sink", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--send", default="", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args()
    if args.sink:
        sink(args.sink)
    elif args.steps:
        uvloop.run(steps([name.strip() for name in args.only.split(";") if name], args.seconds))
    elif args.send:
        send_for(args.port, next(kind for kind in KINDS if kind.name == args.send), args.seconds)
    else:
        asyncio.run(measure([name.strip() for name in args.only.split(";") if name], args.seconds, flags))


if __name__ == "__main__":
    main()
