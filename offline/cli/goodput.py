"""`ppd goodput`: the highest rate of sessions at which a simulated fleet meets its targets on a trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.text import Text

from ppd.proxy.cli import NumberRange
from ppd.proxy.cli.table_view import columns, show
from ppd.proxy.config import Mode
from ppd.proxy.errors import ConfigError, FormatError, PPDError
from ppd.servers.fleet.topology import Topology

from ..advice.interval import Interval
from ..advice.traffic import traffic_of
from ..goodput.modes import NAMES, proxy_setup
from ..goodput.slo import Attainment
from ..goodput.trials import Trials
from ..simulation.playback import Playback
from ..simulation.setup import MOST_WORKERS, Setup
from ..simulation.traced_prompts import TracedPrompts, traced_prompts
from ..traces.formats import UnknownFormat, read
from .receipt_log import is_receipt_log, opened
from .slo_flags import SloFlags, slo_flags, target_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """By one seed. `failed`: the lowest rate above it that did not pass; None: none."""

    seed: int
    rate: float
    failed: float | None
    windows: int
    at_rate: Attainment | None  # None: no rate passed


@click.command("goodput")
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="TRACE")
@click.option("--topology", required=True, help="The fleet, such as 1P_3D, 4R or 1P_2D_1R.")
@click.option("--mode", type=click.Choice(NAMES), default=Mode.TABLE.value, show_default=True)
@slo_flags
@click.option("--seeds", type=click.IntRange(1, 100), default=3, show_default=True, help="From --seed on.")
@click.option(
    "--sessions", type=click.IntRange(1), default=300, show_default=True, help="Of a window, and later turns."
)
@click.option("--precision", type=NumberRange(0.001, 1), default=0.02, show_default=True, help="Of the rate.")
@click.option(
    "--most-tokens", type=click.IntRange(1), help="A session ends before a longer context; default: as engines hold."
)
@click.option("--json", "wants_json", is_flag=True, help="Print the figures as JSON.")
def command(
    source: Path,
    topology: str,
    mode: str,
    seeds: int,
    sessions: int,
    precision: float,
    most_tokens: int | None,
    wants_json: bool,
    **given: Any,
) -> None:
    """Find the highest rate of sessions at which a simulated fleet serves TRACE in time.

    That is, at which first turns and later turns, each by itself, meet the targets in the stated share. TRACE is in any
    format that ppd bench reads, or a receipt log.
    """
    flags = SloFlags(**given)
    try:
        fleet, profile = _fleet(topology), flags.engines()
        if fleet.decodes:
            flags.check_table([mode])
        prompts = _prompts(source, most_tokens or profile.kv_capacity_tokens, flags.longest_pause)
        later = min(sessions, sessions * prompts.later_turns // len(prompts.conversations))
        proxy = proxy_setup(mode, fleet, targets=flags.slo.targets, scored=flags.scored())
        found = list[Found]()
        for seed in range(flags.seed, flags.seed + seeds):
            playback = Playback(rate=None, seed=seed, sessions=sessions, later_turns=later)
            trials = Trials(prompts, topology, Setup(profile=profile), proxy, playback)
            found.append(_searched(trials, flags, seed, precision, found[-1].rate if found else None))
    except PPDError as exc:
        raise click.ClickException(exc.message) from exc
    goodput = Interval.of([one.rate for one in found])
    if wants_json:
        click.echo(
            msgspec.json.encode({"goodput": goodput, "by_seed": found, "profile": profile.name, "slo": flags.slo})
        )
        return
    show(_told(f"{topology}, mode {mode}, profile {profile.name}", flags, goodput, found))


def _fleet(topology: str) -> Topology:
    fleet = Topology.parse(topology)
    if fleet.workers > MOST_WORKERS:
        raise ConfigError(f"topology = {topology!r}: must be of at most {MOST_WORKERS} workers", param="topology")
    return fleet


def _prompts(source: Path, most_tokens: int, most_pause_s: float) -> TracedPrompts:
    if is_receipt_log(source):
        conversations = traffic_of(opened(source).turns).drawn(0)
    else:
        try:
            conversations = read(source)
        except UnknownFormat as exc:
            raise FormatError(f"{exc.message}, nor a receipt log") from exc
    return traced_prompts(conversations, most_tokens=most_tokens, most_pause_s=most_pause_s)


def _searched(trials: Trials, flags: SloFlags, seed: int, precision: float, near: float | None) -> Found:
    found = trials.goodput(flags.slo, precision=precision, near=near or None)
    met = trials.met_at(found.rate, flags.slo) if found.rate else None
    return Found(seed=seed, rate=found.rate, failed=found.failed, windows=trials.played, at_rate=met)


def _told(what: str, flags: SloFlags, goodput: Interval, found: list[Found]) -> Iterator[Text]:
    yield Text(what, "bold")
    yield Text(target_text(flags.slo))
    rows = [("seed", "sessions/s", "first turns in time", "later turns in time", "windows")]
    for one in found:
        met = one.at_rate
        shares = ("-", "-") if met is None else (_share(met.first_met, met.first), _share(met.later_met, met.later))
        rows.append((str(one.seed), f"{one.rate:.4g}", *shares, str(one.windows)))
    yield columns(rows, right=range(5))
    if not goodput.value:
        yield Text("goodput: 0: the targets are met at no rate", "bold")
    else:
        yield Text(f"goodput: {goodput.text()} sessions a second", "bold")


def _share(met: int, turns: int) -> str:
    return f"{met / turns:.1%} of {turns}" if turns else "none"
