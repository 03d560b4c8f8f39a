"""Conversations through the proxy for as long as asked, while its workers fail, leave and come back.

    python -m benchmarks.soak --minutes 30 --out DIR
    python -m benchmarks.soak --records DIR/soak.jsonl.gz --out DIR

The proxy and seven simulated engines run as processes of their own. Clients chat, edit, branch, retry, read slowly and
leave; engines are killed, drained, removed, given another role, and told to refuse, hang, cut or answer garbage; the
proxy is paused, its config file and its clock are tampered with, and a prompt kills engines. Each answer is compared
with that of one engine without faults. The exit status is 1 if a text was wrong, a gauge did not return to zero, the
proxy's log has a traceback, its memory grows, or requests failed that no fault at the time explains. The records are
written first, then the report from them; `--records` writes only the report.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import ssl
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import aiohttp

from ppd.offline.experiment.files import write_whole
from ppd.proxy.connectors.nixl import Nixl
from ppd.proxy.errors import PPDError
from ppd.servers.sim.protocols import PROTOCOLS

from . import records, summary
from .clients import SoakClients
from .engines import SoakEngines
from .fault_plan import plan
from .fault_runner import FaultRunner
from .fleet import ADMIN_KEY, descriptors, loopback_certificate, running_fleet
from .monitor import Monitor, log_defects
from .oracle import Oracle, running_oracle
from .records import Ending, Records, SoakHead
from .report import markdown
from .workload import SoakConversation

_RECORDS = "soak.jsonl.gz"
_WARM_UP_SHARE = 1 / 3  # of the time, at most
_WARM_UP_S = 300.0


async def soak(head: SoakHead, folder: Path, oracle: Oracle) -> Records:
    """Logs and receipts go to `folder`."""
    engines = SoakEngines(head.connector)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=20)  # the proxy is paused for up to 12 s, TLS or not
    tls = ssl.create_default_context(cafile=loopback_certificate(folder)[0]) if head.tls else None
    async with (
        aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(force_close=True, ssl=tls or True)
        ) as operator,
        running_fleet(folder, operator, engines, processes=head.processes, tls=tls) as fleet,
    ):
        descriptors_before = sum(map(descriptors, fleet.proxy_pids))
        begun_s = time.monotonic()

        def clock() -> float:
            return time.monotonic() - begun_s

        monitor, fault_runner = Monitor(fleet, clock), FaultRunner(fleet, clock)
        monitoring = asyncio.create_task(monitor.run())
        async with aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0, ssl=tls or True)
        ) as session:
            clients = SoakClients(session, fleet.url, ADMIN_KEY, oracle, clock)
            conversations = (SoakConversation(head.seed, number) for number in itertools.count())
            async with asyncio.TaskGroup() as group:
                group.create_task(fault_runner.run(plan(head.seed, head.seconds, engines)))
                for _ in range(head.clients):
                    group.create_task(clients.play(conversations, head.seconds))
        monitoring.cancel()
        await asyncio.wait({monitoring})
        leaked, quiet_after_s = await monitor.settle()
        ending = Ending(
            leaked=leaked,
            quiet_after_s=quiet_after_s,
            descriptors_before=descriptors_before,
            descriptors_after=sum(map(descriptors, fleet.proxy_pids)),
            log_defects=log_defects(fleet.proxy_log),
            engine_counts=await monitor.engine_counts(),
        )
        return Records(head, clients.requests, fault_runner.done, monitor.samples, ending)


def head_of(args: argparse.Namespace) -> SoakHead:
    seconds = args.minutes * 60
    return SoakHead(
        seed=args.seed,
        seconds=seconds,
        warm_up_s=min(_WARM_UP_S, seconds * _WARM_UP_SHARE),
        clients=args.clients,
        processes=args.processes,
        connector=args.connector,
        tls=args.tls,
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


async def measure(args: argparse.Namespace) -> Records:
    logs = args.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    async with running_oracle() as oracle:
        return await soak(head_of(args), logs, oracle)


def report(found: Records, output: Path) -> list[str]:
    """Writes the page; returns why the soak failed."""
    write_whole(output / "soak.md", markdown(found).encode())
    print(output / "soak.md")
    return summary.problems(found)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description="A soak of the proxy among faults.", allow_abbrev=False
    )
    top.add_argument("--minutes", type=float, default=30.0, help="how long clients ask; default: 30")
    top.add_argument("--seed", type=int, default=0, help="of the conversations and the faults; default: 0")
    top.add_argument("--clients", type=int, default=12, help="conversations at a time; default: 12")
    top.add_argument("--processes", type=int, default=1, help="of the proxy; default: 1")
    top.add_argument(
        "--connector", choices=list(PROTOCOLS), default=Nixl.name, help=f"of the engines; default: {Nixl.name}"
    )
    top.add_argument("--tls", action="store_true", help="between clients, the proxy and engines")
    top.add_argument("--records", type=Path, help="records of an earlier run: report them again")
    top.add_argument("--out", dest="output", type=Path, required=True, help="folder for records, report and logs")
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    try:
        if args.records:
            found = records.load(args.records)
        else:
            found = asyncio.run(measure(args))
            write_whole(args.output / _RECORDS, found.encode())
        problems = report(found, args.output)
    except PPDError as exc:
        raise SystemExit(f"error: {exc.message}") from exc
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    for problem in problems:
        print(problem, file=sys.stderr)
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
