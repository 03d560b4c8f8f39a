"""`python -m benchmarks.interference --torch`: measures in an interpreter that has PyTorch, fits in this one."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ppd.offline.calibration.steps import load
from ppd.offline.experiment.files import write_whole
from ppd.offline.simulation.modelled_hardware import profile_for
from ppd.proxy.errors import ConfigError
from ppd.proxy.laws.profile_file import encode

from . import measure
from .fit import markdown, profile

_ROOT = Path(__file__).parents[3]
_STEPS = "steps.jsonl.gz"


def add_arguments(top: Any) -> None:
    measure.add_arguments(top)
    top.add_argument("--python", default=sys.executable, help="an interpreter that has PyTorch; this one by default")
    top.add_argument("--steps", type=Path, help="records of an earlier run (steps.jsonl.gz): fit them again")
    top.add_argument("--profile-name", default="engine-step", help="of the engine profile that is written")
    top.add_argument("--base", default="", help="profile whose host work and transfers are taken, by name or path")


def run(args: argparse.Namespace) -> None:
    base = profile_for(args.base) if args.base else None
    path = args.steps or args.output / _STEPS
    if not args.steps:
        measure_elsewhere(args, path)
    steps = load(path)
    found, fit = profile(steps, base, args.profile_name)
    write_whole(args.output / f"{found.name}.json", encode(found))
    skipped = [step for step in steps.steps if step.seconds is None]
    write_whole(args.output / f"{found.name}.md", markdown(found, fit, skipped, base).encode())
    print(args.output / f"{found.name}.json")


def measure_elsewhere(args: argparse.Namespace, path: Path) -> None:
    """In another interpreter, as PyTorch need not be installed in this one; ConfigError if it fails."""
    command = [
        args.python,
        "-m",
        "benchmarks.interference.engine_step.measure",
        "--output",
        str(path.absolute()),
        *measure.argv_of(args),
    ]
    try:
        code = subprocess.run(command, check=False, env=os.environ | {"PYTHONPATH": str(_ROOT)}).returncode
    except OSError as exc:
        raise ConfigError(f"python = {args.python!r}: cannot be started: {exc.strerror}", param="python") from exc
    if code:
        raise ConfigError(f"python = {args.python!r}: the measurement ended with {code}", param="python")
