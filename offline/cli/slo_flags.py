"""The flags of commands that search for a goodput."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import click

from ppd.proxy.cli import NumberRange
from ppd.proxy.config import Mode
from ppd.proxy.decision_table.score import Weights
from ppd.proxy.decision_table.table import DecisionTable, ScoredTable, find
from ppd.proxy.errors import ConfigError
from ppd.proxy.laws.profile_file import ProfileFile, with_cap

from ..goodput.modes import TABLE
from ..goodput.slo import Slo
from ..simulation.modelled_hardware import profile_for
from ..simulation.setup import pulled

PROFILE = "h100-llama-3.1-8b"

Command = Callable[..., Any]
_option = partial(click.option, show_default=True)
_PAUSE = NumberRange(0, 86_400)
_SEED = click.IntRange(0, 1_000_000)
_FLAGS = (
    _option("--profile", default=PROFILE, help="Of the engines: a name, a path, or GPU-MODEL."),
    _option(
        "--long-prefill-tokens",
        type=click.IntRange(0),
        default=0,
        help="Of one prompt in a step while there are other requests, as the engines were started; 0: by profile.",
    ),
    _option("--ttft", default=0.25, help="Target of TTFT, in seconds."),
    _option("--ttft-factor", default=3.0, help="Or, if more, so many times that of an idle engine."),
    _option("--tpot", default=0.025, help="Target of a turn's mean TPOT, in seconds."),
    _option("--share", default=0.9, help="Of first turns that meet both, and of later turns."),
    _option("--table", default=None, help="For mode table; default: the nearest shipped one of the profile."),
    _option("--longest-pause", type=_PAUSE, default=60.0, help="In seconds; longer ones are cut."),
    _option("--seed", type=_SEED, default=0),
)


def slo_flags(command: Command) -> Command:
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command


@dataclass(frozen=True, slots=True, kw_only=True)
class SloFlags:
    """As given."""

    profile: str
    long_prefill_tokens: int
    ttft: float
    ttft_factor: float
    tpot: float
    share: float
    table: str | None
    longest_pause: float
    seed: int

    @property
    def slo(self) -> Slo:
        return Slo(ttft_s=self.ttft, ttft_factor=self.ttft_factor, tpot_s=self.tpot, share=self.share)

    def engines(self) -> ProfileFile:
        """Handoffs are as with NIXL."""
        return with_cap(pulled(profile_for(self.profile, key="profile")), self.long_prefill_tokens)

    def scored(self) -> ScoredTable | None:
        return None if self.table is None else DecisionTable.load(find(self.table)).scored(Weights())

    @property
    def has_table(self) -> bool:
        """Or shipped ones are of this profile."""
        return self.table is not None or TABLE.format("") == f"{self.profile}-"

    def check_table(self, modes: Collection[str]) -> None:
        """ConfigError where mode `table` is asked for, and none is there."""
        if Mode.TABLE in modes and not self.has_table:
            raise ConfigError(f"table: must be given for mode table: none ships for {self.profile}", param="table")


def target_text(slo: Slo) -> str:
    return (
        f"TTFT {slo.ttft_s:g} s, or {slo.ttft_factor:g} x that of an idle engine if that is more, and TPOT "
        f"{slo.tpot_s * 1000:g} ms, for {slo.share:.0%} of the first turns and of the later ones"
    )
