"""`ppd replay`: what other rules would have decided for the turns of a receipt log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.text import Text

from ppd.proxy.cli.table_view import columns, show
from ppd.proxy.config import Mode, ProxyConfig, build
from ppd.proxy.errors import ConfigError, PPDError
from ppd.proxy.laws.accuracy import STALE
from ppd.proxy.laws.profile_file import find
from ppd.proxy.laws.targets import ALLOWED_TARGETS, GivenTargets, given_targets
from ppd.proxy.settings import Settings

from ..goodput.modes import SIMULATED
from ..replay.past_beliefs import SessionLimits
from ..replay.replay import replay
from ..replay.summary import Difference, Summary, summary
from .receipt_log import opened

CAVEAT = "Each turn is decided by itself, with all others as they went: what a fleet would come to, a simulation tells."


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFlags:
    """The options that are keys of the config, as they were given; None for one that was not."""

    mode: str | None
    profile: str | None
    table: str | None
    w_ttft: float | None
    w_tpot: float | None
    long_prefill_tokens: int | None

    def given(self) -> dict[str, object]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@click.command("replay")
@click.argument("log", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="LOG")
@click.option(
    "--config",
    "config_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The rules of this TOML file; the flags win over it.",
)
@click.option("--mode", type=click.Choice(SIMULATED), help="Decide in this mode.")
@click.option("--profile", help="Engine profile of all workers, by name or path.")
@click.option("--table", help="For mode table.")
@click.option("--w-ttft", type=float, help="Weight of TTFT.")
@click.option("--w-tpot", type=float, help="Weight of TPOT.")
@click.option(
    "--long-prefill-tokens",
    type=int,
    help="Of one prompt in a step while there are other requests, as the engines were started.",
)
@click.option("--slo", help="Targets of all turns, as ttft=0.5,tpot=0.03; default: those that the receipts name.")
@click.option("--json", "wants_json", is_flag=True, help="Print the figures as JSON.")
def command(log: Path, config_path: Path | None, slo: str | None, wants_json: bool, **given: Any) -> None:
    """Decide the turns of the receipt log LOG again, by other rules.

    Tells how many decisions change, and by how much the laws say that TTFT, TPOT and missed targets do, with intervals.
    """
    try:
        config = build(config_path, ReplayFlags(**given).given())
        found = replayed(log, config, targets_of(slo))
    except PPDError as exc:
        raise click.ClickException(exc.message) from exc
    if wants_json:
        click.echo(msgspec.json.encode(found))
        return
    show(told(found, config))


def targets_of(text: str | None) -> GivenTargets | None:
    if text is None:
        return None
    try:
        return given_targets(text)
    except ValueError:
        raise ConfigError(f"--slo: must be {ALLOWED_TARGETS}", param="slo") from None


def replayed(path: Path, config: ProxyConfig, targets: GivenTargets | None) -> Summary:
    """Damaged lines are named on standard error."""
    if not config.profile:
        raise ConfigError(
            "profile: must name an engine profile, as --profile: differences are predicted by it", param="profile"
        )
    if config.mode is Mode.PROFILES:
        raise ConfigError(
            f"mode = {config.mode.value!r}: a log names no labels; must be {', '.join(SIMULATED)}", param="mode"
        )
    settings = Settings(config)
    log = opened(path)
    capacity_tokens = find(config.profile).kv_capacity_tokens
    compared = replay(
        log.turns,
        settings.rules(),
        settings.laws,
        capacity_tokens=capacity_tokens,
        targets=targets,
        sessions=SessionLimits(ttl_s=config.session_ttl_s, most=config.session_limit),
    )
    if not compared.count:
        raise ConfigError(f"{path}: the rules found no worker for any turn", param="log")
    return summary(log, compared)


def told(found: Summary, config: ProxyConfig) -> Iterator[Text]:
    yield Text(f"{found.turns} turns of {found.sessions} sessions, decided again in mode {config.mode}", "bold")
    seen = " ".join(f"{count}{role}" for role, count in found.workers.items())
    missing = "; no P, so none of these turns can be SPLIT by any rules" if "P" not in found.workers else ""
    yield Text(f"over the workers that they went to: {seen}{missing}")
    left_out = (
        ("were taken on by no worker", found.undecided),
        ("are there once more", found.repeated),
        ("found no worker by these rules", found.refused),
        ("went to workers of which nothing is predicted", found.unpredicted),
        ("damaged lines", found.damaged),
    )
    if any(count for _, count in left_out):
        yield Text("left out: " + ", ".join(f"{count} {what}" for what, count in left_out if count))
    yield Text(f"\n{found.changed} decisions change ({found.changed / found.turns:.1%})")
    for before, after, count in found.changes:
        what = f"{before} on other workers" if before == after else f"{before} to {after}"
        yield Text(f"  {count:>8}  {what}")
    yield Text("")
    heading = ("predicted", "as it was", "by these rules", "difference", "95 % interval")
    rows = [
        _row("mean TTFT, ms", found.ttft_s, 1000.0),
        ("p99 TTFT, ms", *(f"{value * 1000:.1f}" for value in found.ttft_p99_s), "", ""),
        _row("mean TPOT, ms", found.tpot_s, 1000.0),
        _row("turns that miss a target, %", found.missed, 100.0),
    ]
    yield columns([heading, *rows], right=range(1, 5))
    yield Text("")
    for name, count, middle, absolute in found.errors:
        stale = f": more than {STALE:.0%}, so the differences say little" if absolute > STALE else ""
        yield Text(
            f"{name} against predicted, {count} turns: median error {middle:+.0%}, "
            f"median absolute error {absolute:.0%}{stale}"
        )
    yield Text(f"\n{CAVEAT}", "dim")


def _row(name: str, difference: Difference, scale: float) -> tuple[str, str, str, str, str]:
    before, after = (f"{value * scale:.2f}" for value in (difference.before, difference.after))
    note = "" if difference.is_clear else " (not clear)"
    low, high = difference.low, difference.high
    interval = "too few sessions" if low is None or high is None else f"{low * scale:+.2f} to {high * scale:+.2f}"
    return name, before, after, f"{difference.change * scale:+.2f}{note}", interval
