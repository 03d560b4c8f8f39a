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
import msgspec
from msgspec.structs import replace as replace_struct
from rich.console import Console

from ppd.proxy.errors import ConfigError, PPDError
from ppd.proxy.laws.profile_file import Fit, Name, ProfileFile, encode, find

from ..calibration.assess import assess
from ..calibration.document import Without, document, said
from ..calibration.fit import Simulations, fit
from ..calibration.sources import CalibrationSource, open_source
from ..calibration.steps import STEPS, check, larger, load
from ..experiment.files import check_writable, write_whole
from ..simulation.modelled_hardware import profile_for
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
    check: str | None
    steps: Path | None
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
    type=click.IntRange(0),
    help="Of each of its two passes; 0: the costs that a fit begins from, as they are.",
)
@click.option("--check", metavar="PROFILE", help="Fit nothing: the errors of a profile, by its name or path.")
@click.option(
    "--steps",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Steps of benchmarks.interference --torch on that GPU: check what is larger than what the fit saw.",
)
@click.option("--jobs", default=os.cpu_count(), show_default=True, type=click.IntRange(1), help="Processes.")
def command(source: Path, **given: Any) -> None:
    """Fit an engine profile to SOURCE: a sweep's folder, or the rows of the published grid.

    The runs that were measured are simulated, and the costs sought under which the simulated means of TTFT and TPOT
    come closest to the measured ones. The profile says what it was fitted on and how far it is from what it was not.
    `--check PROFILE SOURCE` shows how far a profile is from SOURCE; for a profile that was computed, or for engine
    steps, SOURCE is a file of steps.
    Configurations are called as in the published rows: 2P_2D is x = 0 there, 2P_2pD is x = 1.
    """
    flags = CalibrateFlags(**given)
    try:
        if flags.check is not None and flags.steps is not None:
            raise ConfigError("--steps: with --check, give the steps as SOURCE", param="steps")
        if source.name.endswith(STEPS):
            _check_steps(source, flags.check)
            return
        known = open_source(source, flags.kv_capacity)
        if unknown := set(flags.fit_on) - set(known.configs):
            raise ConfigError(f"--fit-on {min(unknown)}: {source} has {', '.join(known.configs)}", param="fit_on")
        chosen = replace(known, fitted_on=flags.fit_on or known.fitted_on)
        with Simulations(flags.jobs) as simulations:
            if flags.check is None:
                _calibrate(chosen, simulations, flags)
            else:
                _check(chosen, find(flags.check), simulations)
    except PPDError as exc:
        raise click.ClickException(exc.message) from exc


def _check_steps(path: Path, profile: str | None) -> None:
    if profile is None:
        raise ConfigError(f"{path}: engine steps are no whole requests: give them to --steps or --check", param="steps")
    known = profile_for(profile)
    seen = known.fit.range if known.fit is not None else None
    click.echo(said(check(known.costs, larger(load(path), seen, path.name), seen, path.name)))


def _check(source: CalibrationSource, profile: ProfileFile, simulations: Simulations) -> None:
    fit = profile.fit
    setup = replace(source.setup, profile=profile, slow=fit.slow_worker if fit is not None else None)
    click.echo(assess(source, setup, simulations).markdown(fit.fitted_on if fit is not None else ()))
    longest = max(one.runs[0].workload.longest_context for one in source.observations)
    if guess := profile.beyond(longest):
        click.echo(f"\n{guess}")


UNSEARCHED = (
    "No fit was run: the costs are those that one begins from, chosen by hand after a fit of an earlier law to the "
    "published rows."
)


def _calibrate(source: CalibrationSource, simulations: Simulations, flags: CalibrateFlags) -> None:
    console, steps_file, seen = Console(stderr=True), flags.steps, source.range
    # Before minutes of fitting, so that a file that cannot be used costs none.
    name = _checked(flags.name or source.setup.profile.name)
    path = flags.out or Path(f"{name}.json")
    for file in filter(None, (path, flags.page)):
        check_writable(file)
    steps = None if steps_file is None else (larger(load(steps_file), seen, steps_file.name), seen, steps_file.name)
    setup = _fitted(source, source.setup, simulations, flags.evaluations, console)
    found = assess(source, setup, simulations)
    command_line = shlex.join(["ppd", *sys.argv[1:]])
    profile = replace_struct(
        setup.profile,
        name=name,
        note=setup.profile.note if flags.evaluations else f"{UNSEARCHED} {setup.profile.note}",
        fit=Fit(
            fitted_on=source.fitted_on,
            checked_on=tuple(line.check() for line in found.checks),
            command=command_line,
            range=seen,
            steps=None if steps is None else check(setup.profile.costs, *steps),
            ranking=tuple(one.check() for one in found.rankings),
            slow_worker=setup.slow,
        ),
    )
    write_whole(path, encode(profile))
    click.echo(f"{found.markdown(source.fitted_on)}\n\n{path}")
    if flags.page is not None:
        others = _withouts(source, setup, simulations, flags.evaluations, console) if flags.without else []
        text = document(profile, found, _assumptions(setup), others, command_line)
        write_whole(flags.page, text.encode())


def _checked(name: str) -> str:
    """ConfigError for one with which no profile could be read again."""
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise ConfigError(
            f"name = {name!r}: must be at most 100 letters, digits, '_', '.' and '-': give another --name", param="name"
        ) from None


def _fitted(
    source: CalibrationSource, setup: Setup, simulations: Simulations, evaluations: int, console: Console
) -> Setup:
    observations = source.for_fit(source.fitted_on)
    with console.status(f"fitting to {len(observations)} cells") as status:
        best = float("inf")

        def progress(cost: float) -> None:
            nonlocal best
            best = min(best, cost)
            status.update(f"fitting to {len(observations)} cells: squared log error {best:.3f}")

        found = fit(observations, setup, simulations, evaluations=evaluations, progress=progress)
    return found.setup


_ASSUMPTIONS: dict[str, tuple[Callable[[Setup], bool], str, Callable[[Setup], Setup]]] = {
    "retokenised": (
        lambda setup: setup.retokenised_replies > 0,
        "a share of the answers are other tokens when they come back as text, so turn 2 prefills them again",
        lambda setup: replace(setup, retokenised_replies=0.0),
    ),
    "unrecognised": (
        lambda setup: setup.unrecognised > 0,
        "a share of later turns is not recognised, and gets workers anew as a first turn does",
        lambda setup: replace(setup, unrecognised=0.0),
    ),
    "slow": (
        lambda setup: setup.slow is not None,
        "one worker decodes slower than its likes, the more so the longer the contexts",
        lambda setup: replace(setup, slow=None),
    ),
    "connections": (
        lambda setup: setup.connections is not None,
        "the client opens a limited number of connections, and the TTFT clock runs while a request waits for one",
        lambda setup: replace(setup, connections=None),
    ),
    "routing": (
        lambda setup: setup.published_routing,
        "workers are picked by one hash of the conversation, whatever their load",
        lambda setup: replace(setup, published_routing=False),
    ),
}


def _assumptions(setup: Setup) -> list[str]:
    values = {
        "retokenised": f" ({setup.retokenised_replies:.0%})",
        "unrecognised": f" ({setup.unrecognised:.1%})",
        "connections": f" ({setup.connections})",
    }
    if setup.slow is not None:
        values["slow"] = f" ({setup.slow.worker} of {setup.slow.topology})"
    return [text + values.get(key, "") for key, (holds, text, _) in _ASSUMPTIONS.items() if holds(setup)]


def _withouts(
    source: CalibrationSource, fitted: Setup, simulations: Simulations, evaluations: int, console: Console
) -> Sequence[Without]:
    # Each is fitted anew, from the costs of the whole fit: they would make up for the missing assumption.
    found = []
    for holds, text, drop in _ASSUMPTIONS.values():
        if holds(source.setup):
            setup = _fitted(source, drop(fitted), simulations, evaluations, console)
            found.append(Without(text, assess(source, setup, simulations)))
    return found
