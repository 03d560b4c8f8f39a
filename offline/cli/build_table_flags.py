"""The flags of `ppd-build-table`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import click

from ppd.proxy.cli import NumberRange
from ppd.proxy.laws.profile_file import Transfers

from ..load.target import Api

AUTO = "auto"
TRANSFERS = tuple(one.value for one in Transfers)
APIS = (Api.COMPLETIONS.value, Api.CHAT.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildTableFlags:
    """The options, as they are named on the command line."""

    simulate: bool
    launch: bool
    targets: tuple[str, ...]
    out: Path | None
    grid: str
    topology: str
    only: tuple[str, ...]
    seeds: int | None
    max_seeds: int | None
    precision: float | None
    listing: bool
    resume: bool
    keep_failed: bool
    jobs: int | None
    ray: str
    hardware: str
    transfers: str | None
    engine: str
    tensor_parallel: int
    engine_args: tuple[str, ...]
    model: str
    api: str
    tokenizer: Path | None
    request_timeout: float
    admin_key: str  # from PPD_ADMIN_KEY: every user of the machine can see a command line
    admin_key_file: Path | None
    gpu: str
    gpu_count: int
    note: str
    health_limit: float

    @property
    def folder(self) -> Path:
        if self.out is None:
            raise click.UsageError("--out DIR is missing: where the sweep's runs go")
        return self.out

    def check(self, given: Collection[str]) -> None:
        """UsageError unless exactly one way of measuring is chosen and every flag in `given` applies to it."""
        ways = {"simulate": self.simulate, "launch": self.launch, "target": bool(self.targets)}
        chosen = [way for way, is_chosen in ways.items() if is_chosen]
        if len(chosen) != 1:
            raise click.UsageError("one way of measuring must be given: --simulate, --launch or --target URL")
        if self.topology == AUTO and not self.targets:
            raise click.UsageError("--topology auto goes with --target only: it asks the proxy")
        for name in given:
            if name in _GOES_WITH and chosen[0] not in _GOES_WITH[name]:
                allowed = " and ".join(f"--{way}" for way in _GOES_WITH[name])
                raise click.UsageError(f"{flag(name)} goes with {allowed} only")
        if self.seeds and self.max_seeds and self.max_seeds < self.seeds:
            raise click.UsageError(f"--max-seeds {self.max_seeds} is below --seeds {self.seeds}")
        if self.keep_failed and not self.resume:
            raise click.UsageError("--keep-failed goes with --resume only")


def flag(name: str) -> str:
    return {"targets": "--target", "engine_args": "--engine-arg", "listing": "--list"}.get(
        name, f"--{name.replace('_', '-')}"
    )


_LIVE = ("launch", "target")
_GOES_WITH = {
    **dict.fromkeys(("jobs", "hardware", "transfers"), ("simulate",)),
    **dict.fromkeys(("engine", "tensor_parallel", "engine_args"), ("launch",)),
    **dict.fromkeys(("model", "api", "tokenizer", "request_timeout", "note", "health_limit"), _LIVE),
    **dict.fromkeys(("admin_key_file", "gpu", "gpu_count"), ("target",)),
}
_OPTIONS = (
    click.option("--simulate", is_flag=True, help="Measure in virtual time."),
    click.option("--launch", is_flag=True, help="Start each topology on this machine, CPUs or GPUs."),
    click.option("--target", "targets", multiple=True, metavar="URL", help="Measure a running proxy; repeatable."),
    click.option("--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="The sweep's folder."),
    click.option("--grid", default="", metavar="NAME|FILE", help="Axes; default: those of DIR, else paper."),
    click.option(
        "--topology",
        default="",
        metavar="auto|NAMES",
        help="Instead of the grid's: 1P_3D,4R; auto: the target's.",
    ),
    click.option("--only", multiple=True, metavar="GLOB", help="Cells such as '2P_2D-x1/*/q4'; repeatable."),
    click.option("--seeds", type=click.IntRange(1), help="Runs a cell, at least; default: as the grid says."),
    click.option("--max-seeds", type=click.IntRange(1), help="Runs a cell, at most; default: as the grid says."),
    click.option("--precision", type=NumberRange(0, 1), help="Relative half width at which a cell gets no more seeds."),
    click.option("--list", "listing", is_flag=True, help="Show the runs and the time they take; measure nothing."),
    click.option("--resume", is_flag=True, help="Go on with DIR: what is there is kept, failed runs are done again."),
    click.option("--keep-failed", is_flag=True, help="With --resume: failed runs are not done again."),
    click.option("--jobs", type=click.IntRange(1), help="Simulated runs at a time; default: one a core."),
    click.option("--ray", default="", metavar="ADDRESS", help="Spread runs over a Ray cluster; auto, local."),
    click.option("--hardware", default="", metavar="NAME|FILE", help="Engine profile to simulate."),
    click.option("--transfers", type=click.Choice(TRANSFERS), help="What a handoff moves; default: by profile."),
    click.option("--engine", type=click.Choice(["sim", "vllm"]), default="vllm", show_default=True, help="To launch."),
    click.option("--tensor-parallel", type=click.IntRange(1), default=1, show_default=True, help="GPUs a worker."),
    click.option("--engine-arg", "engine_args", multiple=True, metavar="ARG", help="For each engine; repeatable."),
    click.option("--model", default="", help="To launch, or to ask for; default: the only one that is served."),
    click.option("--api", type=click.Choice(APIS), default=APIS[0], show_default=True, help="How prompts are sent."),
    click.option("--tokenizer", type=click.Path(path_type=Path), metavar="DIR", help="Default: the engines' own."),
    click.option(
        "--request-timeout", type=NumberRange(1), default=600.0, show_default=True, help="Seconds for an answer."
    ),
    click.option("--admin-key-file", type=click.Path(dir_okay=False, path_type=Path), help="Default: PPD_ADMIN_KEY."),
    click.option("--gpu", default="", help="The target's GPUs, which no endpoint reports; for the table."),
    click.option("--gpu-count", type=click.IntRange(0), default=0, help="How many the target has."),
    click.option("--note", default="", help="Kept with every run, and in the table."),
    click.option(
        "--health-limit",
        type=NumberRange(1),
        default=300.0,
        show_default=True,
        help="Seconds in which a fleet must recover.",
    ),
)


def options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
