"""The calibration as a document: the costs, and the errors of every configuration in every region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ppd.servers.engine_profile.profile_file import ProfileFile

from .errors import Errors, markdown


@dataclass(frozen=True, slots=True)
class Without:
    """A fit without one assumption, to show what the assumption is worth."""

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
        parts += [
            f'Without "{without.assumption}", {without.lines[0].region}:\n',
            markdown(without.lines, fitted_on),
            "",
        ]
    return "\n".join(parts).rstrip() + "\n"


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
