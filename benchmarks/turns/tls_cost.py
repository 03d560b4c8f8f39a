"""What TLS costs the proxy: its CPU time for a request over kept connections, with TLS and without, in turn.

    python -m benchmarks.turns.tls_cost

Two proxies before one mock worker, which differ in their certificate alone; HTTP/1.1, 2 KB a request, a whole answer.
Each proxy has a core to itself. The handshakes come before the time that is counted.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click
import msgspec

from ppd.proxy.errors import PPDError
from ppd.servers.fleet.ports import free_ports

from ..overhead.backend import running_backend
from ..overhead.native import build, cache_folder
from ..overhead.processes import HOST, Program, assign_cores, running_on
from ..overhead.usage import usage
from ..soak.fleet import loopback_certificate

PLAIN, WITH_TLS = "plain", "TLS"
STARTS_S = 20.0
_TEXT = "What was said before goes on for as long as it takes to fill two kilobytes. " * 26
_HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Edge:
    """A proxy and how it is reached."""

    name: str
    port: int
    pid: int
    context: ssl.SSLContext | None


@contextmanager
def edges(folder: Path) -> Iterator[Sequence[Edge]]:
    """Both proxies, once each has answered."""
    cores = assign_cores(os.sched_getaffinity(0))
    certificate, key = loopback_certificate(folder)
    contexts = {PLAIN: None, WITH_TLS: ssl.create_default_context(cafile=str(certificate))}
    with running_backend(build(cache_folder()), cores.mock, folder) as backend, ExitStack() as stack:
        found = []
        for name, context in contexts.items():
            (port,) = free_ports(1)
            argv = [str(Path(sys.executable).with_name("ppd")), "serve", "--port", str(port), "--heartbeat-port", "0"]
            argv += ["--workers", f"R={HOST}:{backend.decode}", "--warm-up-s", "0", "--log-level", "warning"]
            if context is not None:
                argv += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
            program = stack.enter_context(Program(argv, cores.proxy, folder / f"{name}.log"))
            found.append(Edge(name, port, program.pid, context))
        stack.enter_context(running_on(cores.load))
        for edge in found:
            asyncio.run(_ready(edge))
        yield found


async def cpu_us(edge: Edge, requests: int, connections: int) -> float:
    """Of one request. PPDError where one is not answered."""
    opened = [await asyncio.open_connection(HOST, edge.port, ssl=edge.context) for _ in range(connections)]
    try:
        before = usage(edge.pid).cpu_s
        share = requests // connections
        await asyncio.gather(*(_ask(reader, writer, share) for reader, writer in opened))
        return (usage(edge.pid).cpu_s - before) / (share * connections) * 1e6
    finally:
        for _, writer in opened:
            writer.close()


async def _ready(edge: Edge) -> None:
    async with asyncio.timeout(STARTS_S):
        while True:
            try:
                await cpu_us(edge, 1, 1)
            except (OSError, PPDError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.1)
            else:
                return


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, requests: int) -> None:
    """One conversation after another: each request is the first of its own."""
    for _ in range(requests):
        text = f"{os.urandom(8).hex()} {_TEXT}"
        body = msgspec.json.encode({"model": "mock", "messages": [{"role": "user", "content": text}]})
        writer.write((_HEAD % (HOST, len(body))).encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise PPDError(f"the proxy said {head.splitlines()[0].decode('latin-1')}")


def measure(repetitions: int, requests: int, connections: int) -> dict[str, list[float]]:
    """CPU us of a request, by edge and repetition."""
    found: dict[str, list[float]] = {PLAIN: [], WITH_TLS: []}
    with TemporaryDirectory() as folder, edges(Path(folder)) as both:
        ask = partial(cpu_us, requests=requests, connections=connections)
        for edge in both:  # not counted: a proxy's first requests are slower
            asyncio.run(ask(edge))
        for _ in range(repetitions):
            for edge in both:
                found[edge.name].append(asyncio.run(ask(edge)))
    return found


@click.command()
@click.option("--repetitions", type=click.IntRange(1), default=7)
@click.option("--requests", type=click.IntRange(1), default=3000)
@click.option("--connections", type=click.IntRange(1), default=16)
def main(repetitions: int, requests: int, connections: int) -> None:
    """Measures what TLS costs the proxy for each request."""
    found = measure(repetitions, requests, connections)
    click.echo("CPU us of a request, median (least to most)")
    for name, costs in found.items():
        click.echo(f"{name:>6}: {median(costs):.0f} ({min(costs):.0f} to {max(costs):.0f})")
    ratios = [with_tls / plain for plain, with_tls in zip(found[PLAIN], found[WITH_TLS], strict=True)]
    click.echo(f"TLS over plain: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
