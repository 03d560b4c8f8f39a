"""What Envoy and a picker add to a turn, beside the proxy itself: time to the first chunk, and CPU.

    python -m benchmarks.turns.behind_envoy                    # 200 turns/s for 2 x 30 s to each: about six minutes
    python -m benchmarks.turns.behind_envoy --rate 50 --seconds 10 --repetitions 3

Streams of 16 chunks and then of 64, with prompts of about 2 KB, in conversations, at a rate that does not depend on the
answers. The worker and the clients are written in C. Of one column at a time the programs run, and each is started
anew. `added` is less what the worker takes without anything between. CPU is of all programs of the column but worker
and clients, and of ppd's alone. What a chunk costs is the difference between long and short streams. Figures are
medians over the repetitions.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import click
import yaml  # type: ignore[import-untyped]

from ppd.proxy.config import ProxyConfig
from ppd.proxy.errors import PPDError
from ppd.proxy.gateway.envoy_config import envoy_config
from ppd.servers.fleet.gateway import find_envoy
from ppd.servers.fleet.ports import HOST, free_ports

from ..overhead.backend import LoadGenerator, ask_once, finished, running_backend
from ..overhead.bodies import ChatShape
from ..overhead.native import Tools, build, cache_folder
from ..overhead.processes import Cores, Program
from ..overhead.records import LoadResult, this_machine
from ..overhead.rows import LoadMode, Row
from ..overhead.usage import usage

STARTS_IN_S = 60.0
CONNECTIONS = 64
CHUNKS = (16, 64)  # of a stream, one a millisecond
PROMPT = ChatShape(opening_bytes=1500, streams=True, every_us=1000)


@dataclass(frozen=True, slots=True)
class Column:
    """programs: the command lines, of a worker's port and free ones, of which the first is what clients ask."""

    name: str
    programs: Callable[[int, Sequence[int], Path], list[list[str]]]


def proxy(worker: int, ports: Sequence[int], *, processes: int = 1, is_picker: bool = False, at: int = 0) -> list[str]:
    argv = [str(Path(sys.executable).with_name("ppd")), "serve", "--port", str(ports[at]), "--heartbeat-port", "0"]
    argv += ["--workers", f"R={HOST}:{worker}", "--mode", "replica", "--log-level", "warning"]
    argv += ["--processes", str(processes), "--warm-up-s", "0"]
    return [*argv, "--picker-port", str(ports[2])] if is_picker else argv


def envoy(worker: int, ports: Sequence[int], folder: Path, *, asks: bool) -> list[str]:
    """On the first port. asks: the picker on the third, whose own port is the second; else all goes to the worker."""
    config = ProxyConfig(port=ports[1] if asks else worker)
    text = envoy_config(config, (HOST, ports[0]), [(HOST, ports[2])])
    if not asks:
        whole = yaml.safe_load(text)
        manager = whole["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        host = manager["route_config"]["virtual_hosts"][0]
        host["routes"] = [{"match": {"prefix": "/"}, "route": {"cluster": "ppd", "timeout": "0s"}}]
        manager["http_filters"] = manager["http_filters"][-1:]
        text = yaml.safe_dump(whole)
    file = folder / "envoy.yaml"
    file.write_text(text)
    return [find_envoy(), "-c", str(file), "--disable-hot-restart", "-l", "error"]


def behind(processes: int) -> Callable[[int, Sequence[int], Path], list[list[str]]]:
    return lambda worker, ports, folder: [
        proxy(worker, ports, processes=processes, is_picker=True, at=1),
        envoy(worker, ports, folder, asks=True),
    ]


COLUMNS = (
    Column("direct", lambda worker, ports, folder: []),
    Column("proxy", lambda worker, ports, folder: [proxy(worker, ports)]),
    Column("Envoy alone", lambda worker, ports, folder: [envoy(worker, ports, folder, asks=False)]),
    Column("Envoy and picker", behind(1)),
    Column("Envoy and picker of 2 processes", behind(2)),
)


@dataclass(frozen=True, slots=True)
class GatewayCost:
    """Of streams of one length. ppd_cpu_s: what of `cpu_s` is not Envoy's."""

    load: LoadResult
    cpu_s: float
    ppd_cpu_s: float

    @property
    def faults(self) -> int:
        """Not those that the load generator's end has cut off."""
        load = self.load
        return load.refused + load.broken + load.refusals + load.wrong

    @property
    def turn_us(self) -> tuple[float, float]:
        """CPU of all programs, and of ppd."""
        asked = max(1, self.load.asked)
        return 1e6 * self.cpu_s / asked, 1e6 * self.ppd_cpu_s / asked


Lengths = list[GatewayCost]  # one for each of CHUNKS


@contextmanager
def running(column: Column, worker: int, folder: Path, cores: Cores) -> Iterator[tuple[int, list[Program]]]:
    """The port that clients ask, once it answers, and the programs behind it."""
    ports = free_ports(3)
    with ExitStack() as stack:
        started = [
            stack.enter_context(Program(argv, cores.proxy, folder / f"{number}.log"))
            for number, argv in enumerate(column.programs(worker, ports, folder))
        ]
        port, until_s = ports[0] if started else worker, time.monotonic() + STARTS_IN_S
        while not ask_once(port):
            if time.monotonic() > until_s or any(one.has_ended for one in started):
                said = "; ".join(one.log.read_text(errors="replace").strip()[-300:] for one in started)
                raise PPDError(f"{column.name} does not answer: {said}")
            time.sleep(0.1)
        yield port, started


def measure(column: Column, rate: float, seconds: float, tools: Tools, cores: Cores) -> Lengths:
    with tempfile.TemporaryDirectory(prefix="ppd-envoy-") as name, ExitStack() as stack:
        folder = Path(name)
        backend = stack.enter_context(running_backend(tools, cores.mock, folder))
        port, programs = stack.enter_context(running(column, backend.decode, folder, cores))
        generator = LoadGenerator(tools, cores, folder)
        found = []
        for chunks in CHUNKS:
            shape = replace(PROMPT, words=chunks)
            row = Row(name="gateway", connections=CONNECTIONS, load=LoadMode.OPEN, conversation=shape, rate=rate)
            first = generator.new_conversations()
            generator.ask_first_turns(row, port, first)
            before_s = spent_s(programs)
            with generator.asking(row, port, first, seconds) as asking:
                load = finished(asking)
            cpu_s, ppd_cpu_s = (now - then for now, then in zip(spent_s(programs), before_s, strict=True))
            found.append(GatewayCost(load, cpu_s, ppd_cpu_s))
        return found


def spent_s(programs: Sequence[Program]) -> tuple[float, float]:
    """CPU of all, and of ppd."""
    each = [(usage(one.pid).cpu_s, find_envoy() in one.argv) for one in programs]
    return sum(cpu_s for cpu_s, _ in each), sum(cpu_s for cpu_s, is_envoy in each if not is_envoy)


def line(column: Column, found: Sequence[Lengths], direct: Sequence[Lengths]) -> str:
    """found, direct: by repetition."""
    faults = sum(one.faults for lengths in found for one in lengths)
    added = [added_ms(lengths[0].load, least[0].load) for lengths, least in zip(found, direct, strict=True)]
    known = [each for each in added if each is not None]
    ttft = [f"{median(each):.2f}" for each in zip(*known, strict=True)] or ["-", "-"]
    turns = [f"{median(each):.0f}" for each in zip(*(short.turn_us for short, _ in found), strict=True)]
    by_chunk = [[more - less for more, less in zip(long.turn_us, short.turn_us, strict=True)] for short, long in found]
    chunks = [f"{median(each) / (CHUNKS[1] - CHUNKS[0]):.1f}" for each in zip(*by_chunk, strict=True)]
    return f"| {' | '.join([column.name, *ttft, *turns, *chunks, str(faults)])} |"


def added_ms(load: LoadResult, direct: LoadResult) -> tuple[float, float] | None:
    """To the first chunk, at the median and at p99."""
    if load.first is None or direct.first is None:
        return None
    return (load.first.p50_us - direct.first.p50_us) / 1000, (load.first.p99_us - direct.first.p99_us) / 1000


def compare(columns: Sequence[Column], rate: float, seconds: float, repetitions: int = 1) -> Iterator[str]:
    """The lines of the table. The first column is what is asked without anything between."""
    everywhere = frozenset(os.sched_getaffinity(0))
    tools, cores = build(cache_folder()), Cores(everywhere, everywhere, everywhere)
    measured: dict[str, list[Lengths]] = {column.name: [] for column in columns}
    for _ in range(repetitions):
        for column in columns:
            measured[column.name].append(measure(column, rate, seconds, tools, cores))
    machine = this_machine()
    yield (
        f"{datetime.now(UTC):%Y-%m-%d}: {rate:.0f} turns/s, {seconds:.0f} s each, {repetitions} repetitions. "
        f"{machine.cpu}, {machine.cores} cores, Linux {machine.kernel}, Python {machine.python}.\n"
    )
    yield "| | added TTFT p50, ms | p99, ms | CPU a turn, us | of it ppd | CPU a chunk, us | of it ppd | failed |"
    yield "|---|---|---|---|---|---|---|---|"
    for column in columns[1:]:
        yield line(column, measured[column.name], measured[columns[0].name])


@click.command(help=__doc__)
@click.option("--rate", default=200.0, show_default=True, help="Turns a second.")
@click.option("--seconds", default=30.0, show_default=True, help="Of each length of streams.")
@click.option("--repetitions", default=1, show_default=True)
def main(rate: float, seconds: float, repetitions: int) -> None:
    try:
        for each in compare(COLUMNS, rate, seconds, repetitions):
            click.echo(each)
    except PPDError as exc:
        raise click.ClickException(exc.message) from exc


if __name__ == "__main__":
    main()
