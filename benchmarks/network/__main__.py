"""Conversations through the proxy over a bad network to its workers.

    python -m benchmarks.network --out DIR

Each row has one P and two D, simulated engines in processes of their own: without fault, with latency, with loss, with
one D cut off for two seconds, with connections reset again and again. The clients and the right texts are the soak's.
The network is made by namespaces and netem where the machine has them and allows it, else by the fault link; the table
says which. The fault link's loss is a model (`fault_link.py`), and the engines' side channels do not pass through it.
Records, table and logs go to DIR; the exit status is 1 if a text was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec

from ppd.offline.experiment.files import write_whole
from ppd.proxy.errors import PPDError

from ..soak.clients import SoakClients
from ..soak.oracle import Oracle, running_oracle
from ..soak.workload import SoakConversation
from . import namespaces
from .fault_link import Conditions
from .fleet import ADMIN_KEY, NetworkKind, running_fleet
from .links import Links
from .report import NetworkResult, markdown, wrong

_CUT_OFF = "D1"


@dataclass(frozen=True, slots=True)
class NetworkTrial:
    name: str
    conditions: Conditions = field(default_factory=Conditions)  # of the network to every worker
    partition_s: float = 0.0  # one of the two D is cut off for so long, in the middle of the trial
    resets_every_s: float = 0.0  # every connection to every worker is reset


TRIALS = (
    NetworkTrial("none"),
    NetworkTrial("5 ms", Conditions(latency_s=0.005)),
    NetworkTrial("50 to 70 ms", Conditions(latency_s=0.05, jitter_s=0.02)),
    NetworkTrial("1 % loss", Conditions(loss=0.01)),
    NetworkTrial("5 % loss", Conditions(loss=0.05)),
    NetworkTrial("one D cut off for 2 s", partition_s=2.0),
    NetworkTrial("all connections reset twice a second", resets_every_s=0.5),
)


async def disturb(trial: NetworkTrial, network: NetworkKind, seconds: float) -> None:
    if trial.partition_s:
        await asyncio.sleep(seconds / 3)
        await network.cut_off(_CUT_OFF)
        await asyncio.sleep(trial.partition_s)
        await network.heal(_CUT_OFF)
    if trial.resets_every_s:
        for _ in range(int(seconds / trial.resets_every_s)):
            await asyncio.sleep(trial.resets_every_s)
            await network.reset()


async def attempt(trial: NetworkTrial, args: argparse.Namespace, oracle: Oracle) -> NetworkResult:
    async with AsyncExitStack() as stack:
        # Not every kernel can reset connections from outside.
        with_netem = args.inside and not trial.resets_every_s
        network: NetworkKind = namespaces.Namespaces(stack) if with_netem else Links(stack, args.seed)
        folder = args.output / "logs" / trial.name.replace(" ", "-").replace("%", "percent")
        fleet = await stack.enter_async_context(running_fleet(network, folder))
        await network.apply(trial.conditions)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        begun_s = time.monotonic()
        clients = SoakClients(session, fleet.url, ADMIN_KEY, oracle, lambda: time.monotonic() - begun_s)
        conversations = (SoakConversation(args.seed, number) for number in itertools.count())
        async with asyncio.TaskGroup() as group:
            group.create_task(disturb(trial, network, args.seconds))
            for _ in range(args.clients):
                group.create_task(clients.play(conversations, args.seconds))
        return NetworkResult(
            trial=trial.name, made_by=network.name, retries=await fleet.retries(), requests=clients.requests
        )


async def measure(args: argparse.Namespace) -> list[NetworkResult]:
    found = []
    async with running_oracle() as oracle:
        for trial in TRIALS:
            if args.only and trial.name not in args.only:
                continue
            print(trial.name, file=sys.stderr, flush=True)
            found.append(await attempt(trial, args, oracle))
    return found


def enter_namespace(arguments: Sequence[str]) -> None:
    """Replaces this process by the same program in a network namespace of its own."""
    argv = ["unshare", "--net", "--", sys.executable, "-m", "benchmarks.network", *arguments, "--inside"]
    os.execvp(argv[0], argv)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m benchmarks.network", description="The proxy over a bad network.", allow_abbrev=False
    )
    top.add_argument("--out", dest="output", type=Path, required=True, help="folder for records, table and logs")
    top.add_argument("--seconds", type=float, default=12.0, help="that clients ask, for each row; default: 12")
    top.add_argument("--clients", type=int, default=8, help="conversations at a time; default: 8")
    top.add_argument("--seed", type=int, default=0, help="of the conversations and the fault link; default: 0")
    names = [trial.name for trial in TRIALS]
    shown = ", ".join(names).replace("%", "%%")  # which argparse would expand
    top.add_argument("--only", nargs="+", choices=names, metavar="ROW", help=f"any of: {shown}")
    top.add_argument("--links", action="store_true", help="the fault link, even where netem is available")
    top.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser().parse_args(arguments)
    if not args.inside and not args.links and namespaces.is_available():
        enter_namespace(arguments)
    try:
        found = asyncio.run(measure(args))
    except PPDError as exc:
        raise SystemExit(f"error: {exc.message}") from exc
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    table = markdown(found)
    write_whole(args.output / "network.jsonl", b"".join(msgspec.json.encode(one) + b"\n" for one in found))
    write_whole(args.output / "network.md", table.encode())
    print(table)
    raise SystemExit(1 if any(map(wrong, found)) else 0)


if __name__ == "__main__":
    main()
