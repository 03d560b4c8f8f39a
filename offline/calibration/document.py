"""The calibration as a document: the costs, and the errors of every configuration in every region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ppd.proxy.laws.profile_file import Fit, ProfileFile, StepCheck

from .assess import Assessment
from .errors import markdown
from .fit import SLOW


@dataclass(frozen=True, slots=True)
class Without:
    """A fit without one assumption, to show what the assumption is worth."""

    assumption: str
    found: Assessment


def document(
    profile: ProfileFile,
    found: Assessment,
    assumptions: Sequence[str],
    withouts: Sequence[Without],
    command: str,
) -> str:
    """Markdown."""
    fit = profile.fit
    fitted_on = fit.fitted_on if fit is not None else ()
    parts = [
        f"# Calibration of {profile.name}\n",
        f"Made by `{command}`. Source: {profile.source}. Errors are those of the simulated against the measured mean "
        "of later turns, as shares of the measured; median and 90th percentile of their size over the cells, and the "
        'median with its sign. By the configurations marked "used" the costs were found, by a fit or by hand; the '
        "others only check them.\n",
        "## Costs\n",
        *_costs(profile),
        *([f"\n{profile.note}"] if profile.note else []),
        *_slow(fit),
        *_range(fit),
        "\n## What is assumed about these measurements, not about the engine\n",
        *(f"- {assumption}" for assumption in assumptions),
    ]
    if found.rankings:
        parts += ["\n## Ranking: the share of points that each configuration wins\n", found.ranking()]
    for lines in found.regions:
        parts += [f"\n## {lines[0].region}\n", markdown(lines, fitted_on)]
    if withouts:
        parts.append("\n## The same fit without an assumption\n")
    for without in withouts:
        parts.append(f'Without "{without.assumption}":\n')
        for lines in without.found.regions[:2]:
            parts += [f"{lines[0].region}:\n", markdown(lines, fitted_on), ""]
        parts += [without.found.ranking(), ""]
    return "\n".join(parts).rstrip() + "\n"


def _slow(fit: Fit | None) -> list[str]:
    if fit is None or fit.slow_worker is None:
        return []
    slow = fit.slow_worker
    more = ", ".join(f"{_shown(name, getattr(slow, name))} of `{name}`" for name in SLOW)
    return [f"\n{slow.worker} of {slow.topology} pays more: {more}. No other fleet is simulated with it."]


def _range(fit: Fit | None) -> list[str]:
    if fit is None or fit.range is None:
        return []
    seen = fit.range
    saw = (
        f"\nSeen: contexts of up to {seen.context_tokens:,} tokens, turns of up to {seen.new_tokens:,} new ones, "
        f"and {seen.qps:g} conversations a second."
    )
    if fit.steps is None:
        return [f"{saw} Beyond that, the profile is a guess."]
    believed = "Beyond that" if fit.steps.holds else "That is too far: beyond what the fit saw"
    return [saw, f"\n{said(fit.steps)} {believed}, the profile is a guess."]


def said(check: StepCheck) -> str:
    return (
        f"{check.steps} other steps were measured by themselves, without an engine around them, on {check.gpu} "
        f"({check.source}), with contexts of up to {check.context_tokens:,} tokens and prompts of up to "
        f"{check.new_tokens:,} new ones. The law of steps is {check.error_median:.1%} from them at the median and "
        f"{check.error_p90:.1%} at the 90th percentile (median with its sign {check.bias:+.1%})."
    )


def _costs(profile: ProfileFile) -> list[str]:
    rows = ["| cost | value |", "|---|---|"]
    return rows + [
        f"| `{cost.name}` | {_shown(cost.name, getattr(profile.costs, cost.name))} |" for cost in fields(profile.costs)
    ]


def _shown(name: str, value: float) -> str:
    if name.endswith("bytes_per_s"):
        return f"{value / 1e9:.4g} GB/s"
    if not name.endswith("_s"):
        return f"{value:,} {'bytes' if 'bytes' in name else 'tokens'}"
    scale, unit = next((pair for pair in ((1e3, "ms"), (1e6, "us")) if value * pair[0] >= 1), (1e9, "ns"))
    return f"{value * scale:.4g} {unit}"
