"""What do encoders bring, and cost?

    python -m benchmarks.encoders                              # 2R and 1P_2D, each without and with one E: 14 minutes
    python -m benchmarks.encoders --fleet 2R --workload 10th --encoder always
    python -m benchmarks.encoders --by-laws                    # in mode slo, in which `auto` compares seconds

Simulated engines in real time, each a process of its own, behind the proxy. Each workload is played by the load
generator of `ppd bench`, with the same arrivals and prompts on a fleet and on the fleet with an E beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from ppd.offline.bench.run import Bench, play, prepared
from ppd.offline.bench.workloads import ConversationShape, Pace
from ppd.offline.experiment.records import Record
from ppd.offline.load.target import Api, Target
from ppd.servers.fleet.fleet import FleetSpec, LocalFleet
from ppd.servers.fleet.ports import free_offset, free_ports
from ppd.servers.fleet.prepare import prepare
from ppd.servers.fleet.topology import Topology

from .report import EncoderComparison, markdown

FLEETS = ("2R", "1P_2D")
PROFILE = "h100-llama-3.1-8b"
READY_S = 60.0
SHAPES = {
    "text only": ConversationShape(first=(256, 32), later=(64, 32), turns=2, think_s=0.5),
    "every 10th request with an image": ConversationShape(
        first=(256, 32), later=(64, 32), turns=2, think_s=0.5, image_every=10
    ),
    "every request with an image": ConversationShape(first=(256, 32), later=(64, 32), turns=1, image_every=1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderTrial:
    seconds: float
    qps: float
    item_s: float
    encoder: str
    seed: int
    workload: str  # part of its name; empty: all
    by_laws: bool  # the proxy predicts times, and so learns what an item takes in place
    slowness: float  # of engines and clients; figures are shown as of engines that are as fast as their profile

    def engine_args(self) -> tuple[str, ...]:
        return ("--encoder-item-s", f"{self.item_s:g}", "--time-scale", f"{self.slowness:g}")


def slowed(shape: ConversationShape, trial: EncoderTrial) -> ConversationShape:
    return replace(shape, think_s=shape.think_s * trial.slowness)


def _quiet(*_: object) -> None:
    """Of the player's notes and progress."""


async def played(topology: Topology, shape: ConversationShape, trial: EncoderTrial) -> tuple[list[Record], str]:
    """One workload on a new fleet, and what became of its images."""
    port, heartbeat_port = free_ports(2)
    with tempfile.TemporaryDirectory() as folder, free_offset(topology.by_role) as port_offset:
        config = Path(folder) / "ppd.toml"
        laws = f'mode = "slo"\nprofile = "{PROFILE}"\n' if trial.by_laws else ""
        config.write_text(f'{laws}encoder = "{trial.encoder}"\n')
        spec = FleetSpec(
            engine="sim",
            workers=topology.by_role,
            prepared=prepare("sim", "", trial.engine_args(), _quiet),
            port=port,
            heartbeat_port=heartbeat_port,
            port_offset=port_offset,
            proxy_args=("--config", str(config)),
            log_dir=Path(folder) / "logs",
        )
        async with LocalFleet(spec) as fleet:
            await fleet.wait_ready(READY_S)
            bench = await prepared(
                Bench(
                    target=Target(url=fleet.url, model="sim"),
                    api=Api.CHAT,
                    conversations=slowed(shape, trial).conversations(round(trial.qps * trial.seconds)),
                    recorded=False,
                    pace=Pace(qps=trial.qps / trial.slowness),
                    seed=trial.seed,
                ),
                _quiet,
            )
            records = list[Record]()
            await play(bench, records.append, _quiet, _quiet)
            return records, await decisions(fleet.url)


async def decisions(url: str) -> str:
    """Of the proxy's metrics: "encoded 31, busy 2"."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        found = re.findall(r'^ppd_encoder_items_total\{decision="(\w+)"\} (\d+)', await response.text(), re.MULTILINE)
    return ", ".join(f"{name} {count}" for name, count in sorted(found))


async def compare(fleets: Sequence[str], trial: EncoderTrial) -> list[EncoderComparison]:
    found = []
    for fleet in fleets:
        for name, shape in SHAPES.items():
            if trial.workload not in name:
                continue
            without, _ = await played(Topology.parse(fleet), shape, trial)
            with_encoder, items = await played(Topology.parse(f"1E_{fleet}"), shape, trial)
            found.append(EncoderComparison(fleet, name, without, with_encoder, items, trial.slowness))
            print(markdown(found[-1:]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoders", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--fleet", action="append", default=[], help=f"without its E; default: {', '.join(FLEETS)}")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals, times the slowness")
    parser.add_argument("--qps", type=float, default=8.0, help="conversations a second")
    parser.add_argument("--item-s", type=float, default=0.15, help="that an engine takes to encode an image")
    parser.add_argument("--encoder", default="auto", help="the proxy's setting")
    parser.add_argument("--by-laws", action="store_true", help="in mode slo, in which seconds are compared for `auto`")
    parser.add_argument("--slowness", type=float, default=3.0, help="so that this machine's own work weighs less")
    parser.add_argument("--workload", default="", help="those alone with this in their names")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    trial = EncoderTrial(
        seconds=args.seconds,
        qps=args.qps,
        item_s=args.item_s,
        encoder=args.encoder,
        seed=args.seed,
        workload=args.workload,
        by_laws=args.by_laws,
        slowness=args.slowness,
    )
    print(markdown(asyncio.run(compare(args.fleet or FLEETS, trial))))


if __name__ == "__main__":
    main()
