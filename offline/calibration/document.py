"""The calibration for people: the costs, and the errors of every configuration in every region, good or bad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ppd.servers.profiles import ProfileFile

from .errors import Errors, markdown

_UNITS = {
    "transfer_bytes_per_s": (1e-9, "GB/s"),
    "kv_bytes_per_token": (1, "bytes"),
    "max_batched_tokens": (1, "tokens"),
}


@dataclass(frozen=True, slots=True)
class Without:
    """A fit under another assumption, to show what the assumption is worth."""

    assumption: str
    lines: Sequence[Errors]


def document(
    profile: ProfileFile,
    regions: Sequence[Sequence[Errors]],
    fitted_on: Sequence[str],
    assumptions: Sequence[str],
    withouts: Sequence[Without],
    command: str,
) -> str:
    """Markdown. `regions`: the errors of each region, the checked one first."""
    parts = [
        f"# Calibration of {profile.name}\n",
        f"Made by `{command}`. Source: {profile.source}. Errors are those of the simulated against the measured mean "
        "of later turns, as shares of the measured; median and 90th percentile of their size over the cells, and the "
        "median with its sign.\n",
        "## Costs\n",
        *_costs(profile),
        "\n## What is assumed about these measurements, not about the engine\n",
        *(f"- {assumption}" for assumption in assumptions),
    ]
    for lines in regions:
        if lines:
            parts += [f"\n## {lines[0].region}\n", markdown(lines, fitted_on)]
    if withouts:
        parts.append("\n## The same fit without an assumption\n")
    for without in withouts:
        parts += [f'Without "{without.assumption}":\n', markdown(without.lines, fitted_on)]
    return "\n".join(parts)


def _costs(profile: ProfileFile) -> list[str]:
    rows = ["| cost | value |", "|---|---|"]
    for cost in fields(profile.costs):
        value = getattr(profile.costs, cost.name)
        scale, unit = _UNITS.get(cost.name, (1e6, "us"))
        rows.append(f"| `{cost.name}` | {value * scale:,.4g} {unit} |")
    return rows
