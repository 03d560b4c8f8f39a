"""Which mode finds what on real engines that evict each other's conversations, and are the texts right?

    python -m benchmarks.eviction --out DIR                   # 1 P and 2 D, vLLM on CPU; some minutes on two cores

Plays the same conversations in each mode, in several rounds of all modes, through `ppd serve` before vLLM engines with
NIXL and the tiny model, whose KV has room for a part of the conversations only. Before each mode the engines' caches
are emptied and a new proxy is started. Every turn's prompt has the right history, whatever was answered, and every text
is compared with that of one engine alone that computes each prompt from its first token on. All is greedy. What is hit,
moved, computed and evicted is by the engines' own counters. For mode `slo` a profile is measured first, on that engine.

The table goes to DIR/eviction-DATE.md, records to DIR/eviction-DATE.json, logs to DIR/logs. The exit status is 1 if a
text was wrong or a turn failed.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import msgspec

from ppd.offline.experiment.files import load, write_whole
from ppd.proxy.config import Mode
from ppd.proxy.errors import PPDError
from ppd.proxy.fleet.worker import Role
from ppd.proxy.laws import profile_file
from ppd.proxy.laws.profile_file import ProfileFile
from ppd.proxy.policy.modes import PREDICTING
from ppd.servers.fleet.topology import Topology
from ppd.servers.vllm.cpu_install import VERSION
from ppd.servers.vllm.launch import TINY_NAME

from ..overhead.records import this_machine
from .conversations import AskedTurn, Message, Shape, asked_turns
from .engines import ADMIN_KEY, CacheSize, engines, forget, proxy
from .modes import ModeRecord, play_mode
from .play import Player
from .profile import measured
from .report import EvictionRun, decode, encode, needed_tokens, page

MODES = (Mode.TABLE, Mode.ALWAYS_LOCAL, Mode.ALWAYS_SPLIT, Mode.SLO)
# Nothing but the conversations' turns reaches the engines.
PROXY_FLAGS = {"warm-up-s": 0, "canary-interval-s": 0, "probe-interval-s": 0.5}


@dataclass(frozen=True, slots=True)
class Plan:
    shape: Shape
    seed: int
    at_once: int
    size: CacheSize
    topology: Topology
    modes: tuple[Mode, ...]
    rounds: int
    out: Path


@dataclass(frozen=True, slots=True)
class Known:
    """From one engine alone, with room for all."""

    turns: tuple[AskedTurn, ...]
    alone: list[ModeRecord]
    profile: ProfileFile


async def alone(plan: Plan, session: aiohttp.ClientSession) -> Known:
    async with engines({"R1": Role.REPLICA}, CacheSize(), plan.out / "logs" / "alone") as urls:
        player = Player(session, urls["R1"], TINY_NAME, plan.shape.answer_tokens, "profile")
        profile = await measured(player, plan.size.tokens)

        serial = itertools.count()

        async def from_nothing(messages: list[Message]) -> str:
            return await replace(player, salt=f"right-{next(serial)}").text(messages)

        print("asking one engine alone for the right texts", flush=True)
        turns = await asked_turns(plan.shape, plan.seed, from_nothing)
        again = [
            await play_mode(name, replace(player, salt=name), turns, at_once, urls)
            for name, at_once in (("one at a time, cached", 1), (f"{plan.at_once} at once, cached", plan.at_once))
        ]
        return Known(turns, again, profile)


async def in_modes(
    plan: Plan, session: aiohttp.ClientSession, turns: Sequence[AskedTurn], predicting_flags: Mapping[str, str]
) -> list[ModeRecord]:
    named = {f"{role}{n + 1}": role for role, count in plan.topology.by_role.items() for n in range(count)}
    found = []
    async with engines(named, plan.size, plan.out / "logs") as urls:
        for number, mode in itertools.product(range(plan.rounds), plan.modes):
            print(f"playing in mode {mode}, round {number + 1} of {plan.rounds}", flush=True)
            await forget(session, list(urls.values()))
            flags = PROXY_FLAGS | {"mode": mode} | (dict(predicting_flags) if mode in PREDICTING else {})
            async with proxy(urls, flags, plan.out / "logs" / f"proxy-{mode}-{number}.log") as base_url:
                salt = f"{mode}-{number}"
                player = Player(session, base_url, TINY_NAME, plan.shape.answer_tokens, salt, ADMIN_KEY)
                record = await play_mode(mode, player, turns, plan.at_once, urls)
                found.append(msgspec.structs.replace(record, round=number))
    return found


async def measure(plan: Plan) -> EvictionRun:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        known = await alone(plan, session)
        path = plan.out / "logs" / "profile.json"
        write_whole(path, profile_file.encode(known.profile))
        # Three times what a step takes when nothing else runs here: the engines share the cores.
        slo_flags = {"slo-tpot-s": f"{max(0.025, 3 * known.profile.costs.step_s):.3f}", "profile": str(path)}
        found = await in_modes(plan, session, known.turns, slo_flags)
    return EvictionRun(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=f"python -m benchmarks.eviction {shlex.join(argument_shown(each, plan) for each in sys.argv[1:])}",
        machine=this_machine(),
        vllm=VERSION,
        blocks=plan.size.blocks,
        conversations=plan.shape.conversations,
        turns_each=plan.shape.turns,
        needed_tokens=needed_tokens(known.alone[0].turns),
        capacity_tokens=plan.size.tokens * (plan.topology.decodes + plan.topology.replicas),
        at_once=plan.at_once,
        seed=plan.seed,
        alone=known.alone,
        modes=found,
        slo_flags={**slo_flags, "profile": known.profile.name},
        profile=known.profile,
    )


def argument_shown(argument: str, plan: Plan) -> str:
    """Where records lie is nobody's concern."""
    return "DIR" if argument == str(plan.out) else argument


def at_least_1(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def plan_of(args: argparse.Namespace) -> Plan:
    return Plan(
        shape=Shape(args.conversations, args.turns, (300, 500), (100, 300), 32),
        seed=args.seed,
        at_once=args.at_once,
        size=CacheSize(args.blocks),
        topology=Topology.parse(args.topology),
        modes=tuple(args.modes),
        rounds=args.rounds,
        out=args.out,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eviction", description=(__doc__ or "").split("\n")[0])
    to = parser.add_mutually_exclusive_group(required=True)
    to.add_argument("--out", type=Path, metavar="DIR")
    to.add_argument("--report", type=Path, metavar="FILE", help="of records: prints the table again, and plays nothing")
    parser.add_argument("--conversations", type=at_least_1, default=12)
    parser.add_argument("--turns", type=at_least_1, default=6)
    parser.add_argument("--at-once", type=at_least_1, default=3)
    parser.add_argument("--blocks", type=at_least_1, default=128, help="of 32 tokens, of each engine")
    parser.add_argument("--topology", default="1P_2D", help="such as 1P_1D, or 2R")
    parser.add_argument("--modes", type=Mode, nargs="+", choices=list(Mode), default=MODES)
    parser.add_argument("--rounds", type=at_least_1, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        run = load(args.report, decode) if args.report else asyncio.run(measure(plan_of(args)))
        if not args.report:
            write_whole(args.out / f"eviction-{run.date}.md", page(run).encode())
            write_whole(args.out / f"eviction-{run.date}.json", encode(run))
    except PPDError as exc:
        raise SystemExit(str(exc)) from exc
    print(page(run), end="")
    raise SystemExit(any(record.wrong or record.failed for record in (*run.alone, *run.modes)))


if __name__ == "__main__":
    main()
