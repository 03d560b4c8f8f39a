"""`ppd calibrate`: an engine profile from measurements, with its errors."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace as replace_struct
from rich.console import Console

from ppd.proxy.errors import ConfigError, PPDError
from ppd.servers.engine_profile.profile_file import Fit, encode

from ..calibration.document import Without, document
from ..calibration.errors import Errors, errors, markdown
from ..calibration.fit import Simulations, fit, with_costs
from ..calibration.sources import CalibrationSource, Region, open_source
from ..experiment.files import write_whole
from ..simulation.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateFlags:
    """The options, as they are named on the command line."""

    out: Path | None
    name: str | None
    kv_capacity: int | None
    fit_on: tuple[str, ...]
    page: Path | None  # --document
    without: bool
    evaluations: int
    jobs: int


@click.command("calibrate")
@click.argument("source", type=click.Path(exists=True, path_type=Path), metavar="SOURCE")
@click.option("--out", type=click.Path(path_type=Path), help="The profile; default NAME.json here.")
@click.option("--name", help="Of the profile; default: by the source.")
@click.option("--kv-capacity", type=click.IntRange(1), help="Tokens of KV that an engine holds; no record tells it.")
@click.option("--fit-on", multiple=True, metavar="CONFIG", help="Configurations to fit; the others are only checked.")
@click.option("--document", "page", type=click.Path(path_type=Path), help="Write the errors as Markdown too.")
@click.option("--without", is_flag=True, help="Fit again without each assumption about the source; takes as long each.")
@click.option(
    "--evaluations",
    default=12,
    show_default=True,
    type=click.IntRange(1),
    help="Of each of its two passes.",
)
@click.option("--jobs", default=os.cpu_count(), show_default=True, type=click.IntRange(1), help="Processes.")
def command(source: Path, **given: Any) -> None:
    """Fit an engine profile to SOURCE: a sweep's folder, or the rows of the published grid.

    The runs that were measured are simulated, and the costs sought under which the simulated means of TTFT and TPOT
    come closest to the measured ones. The profile says what it was fitted on and how far it is from what it was not.
    Configurations are called as in the published rows: 2P_2D is x = 0 there, 2P_2pD is x = 1.
    """
    flags = CalibrateFlags(**given)
    try:
        known = open_source(source, flags.kv_capacity)
        if unknown := set(flags.fit_on) - set(known.configs):
            raise ConfigError(f"--fit-on {min(unknown)}: {source} has {', '.join(known.configs)}", param="fit_on")
        chosen = replace(known, fitted_on=flags.fit_on or known.fitted_on)
        with Simulations(flags.jobs) as simulations:
            _calibrate(chosen, simulations, flags)
    except PPDError as exc:
        raise click.ClickException(exc.message) from exc


def _calibrate(source: CalibrationSource, simulations: Simulations, flags: CalibrateFlags) -> None:
    console = Console(stderr=True)
    setup = _fitted(source, source.setup, simulations, flags.evaluations, console)
    checks = _errors(source, source.check_region, setup, simulations)
    command_line = shlex.join(["ppd", *sys.argv[1:]])
    profile = replace_struct(
        setup.profile,
        name=flags.name or setup.profile.name,
        fit=Fit(fitted_on=source.fitted_on, checked_on=tuple(line.check() for line in checks), command=command_line),
    )
    path = flags.out or Path(f"{profile.name}.json")
    write_whole(path, encode(profile))
    click.echo(f"{markdown(checks, source.fitted_on)}\n\n{path}")
    if flags.page is not None:
        regions = [checks, *(_errors(source, region, setup, simulations) for region in source.other_regions)]
        others = _withouts(source, simulations, flags.evaluations, console) if flags.without else []
        text = document(profile, regions, source.fitted_on, _assumptions(source.setup), others, command_line)
        write_whole(flags.page, text.encode())


def _fitted(
    source: CalibrationSource, setup: Setup, simulations: Simulations, evaluations: int, console: Console
) -> Setup:
    observations = source.for_fit(source.fitted_on)
    if not observations:
        raise ConfigError(f"nothing to fit on: no cell of {', '.join(source.fitted_on)} finished", param="fit_on")
    with console.status(f"fitting to {len(observations)} cells") as status:
        best = float("inf")

        def progress(cost: float) -> None:
            nonlocal best
            best = min(best, cost)
            status.update(f"fitting to {len(observations)} cells: squared log error {best:.3f}")

        found = fit(observations, setup, simulations, evaluations=evaluations, progress=progress)
    return with_costs(setup, found.costs)


def _errors(source: CalibrationSource, region: Region, setup: Setup, simulations: Simulations) -> list[Errors]:
    observations = region.of(source.observations)
    if not observations:
        return []
    return errors(observations, simulations.means(observations, setup), region.name, source.configs)


_ASSUMPTIONS: dict[str, tuple[Callable[[Setup], bool], str, Callable[[Setup], Setup]]] = {
    "retokenised": (
        lambda setup: setup.retokenised_replies,
        "an answer sent back as text is other tokens than were generated, so turn 2 prefills turn 1's answer again",
        lambda setup: replace(setup, retokenised_replies=False),
    ),
    "unrecognised": (
        lambda setup: setup.unrecognised > 0,
        "a share of the turns that should stay local is not recognised as later ones, and goes through P",
        lambda setup: replace(setup, unrecognised=0.0),
    ),
    "connections": (
        lambda setup: setup.connections is not None,
        "the client opens a limited number of connections, and the TTFT clock runs while a request waits for one",
        lambda setup: replace(setup, connections=None),
    ),
    "routing": (
        lambda setup: setup.published_routing,
        "P and D are picked by one hash of the conversation, whatever their load",
        lambda setup: replace(setup, published_routing=False),
    ),
}


def _assumptions(setup: Setup) -> list[str]:
    values = {"unrecognised": f" ({setup.unrecognised:.1%})", "connections": f" ({setup.connections})"}
    return [text + values.get(key, "") for key, (holds, text, _) in _ASSUMPTIONS.items() if holds(setup)]


def _withouts(
    source: CalibrationSource, simulations: Simulations, evaluations: int, console: Console
) -> Sequence[Without]:
    # Each is fitted anew: the old costs would make up for the missing assumption.
    found = []
    for holds, text, drop in _ASSUMPTIONS.values():
        if holds(source.setup):
            setup = _fitted(source, drop(source.setup), simulations, evaluations, console)
            found += [Without(text, _errors(source, region, setup, simulations)) for region in source.fit_regions]
    return found
