"""How far a profile's law of steps is from steps that were measured by themselves."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from ppd.offline.calibration.document import said
from ppd.offline.calibration.steps import StepRecord, Steps, check, larger, load
from ppd.offline.cli.calibrate import command
from ppd.proxy.errors import FormatError
from ppd.proxy.laws.profile_file import Fit, FittedRange, StepCheck, encode, find
from ppd.proxy.laws.profile_file import decode as decode_profile
from ppd.proxy.laws.step_time import EngineProfile, step_time_s
from tests.support.stepped_engine import profile_of

SOURCE = Path(__file__).parents[3] / "tables" / "source"
GRID = SOURCE / "ppd-h100-grid.csv.gz"
COSTS = EngineProfile()
SEEN = FittedRange(context_tokens=3000, new_tokens=1000, qps=8.0)
HEAD = load(SOURCE / "h100-engine-steps.jsonl.gz").head


def step(decode: int, context: int, prefill: int, cached: int, off: float = 0.0) -> StepRecord:
    """Measured, at a time from which the law is `off`."""
    bare = StepRecord(decode=decode, context=context, prefill=prefill, cached=cached)
    return msgspec.structs.replace(bare, seconds=(step_time_s(COSTS, *bare.load) / (1 + off),))


def steps(*rows: StepRecord) -> Steps:
    return Steps(HEAD, rows, ())


SMALL = step(64, 2048, 128, 2048, off=1.0)
SKIPPED = StepRecord(decode=1, context=9000, prefill=0, cached=0, skipped="full")
DECODE, CACHED, CHUNK = step(2, 131_072, 0, 0, -0.1), step(0, 0, 16, 8192, 0.2), step(0, 0, 1001, 4000, 0.3)


def checked(*rows: StepRecord, seen: FittedRange | None = SEEN) -> StepCheck:
    return check(COSTS, larger(steps(*rows), seen, "s"), seen, "s")


def test_only_what_is_larger_than_the_fit_saw_is_compared() -> None:
    found = checked(SMALL, SKIPPED, DECODE, CACHED, CHUNK)
    assert (found.steps, found.context_tokens, found.new_tokens) == (3, 131_072, 5001)
    assert (found.error_median, found.bias) == (0.2, 0.2)


def test_a_profile_that_states_no_range_is_compared_with_every_step() -> None:
    assert checked(SMALL, SKIPPED, DECODE, seen=None).steps == 2


@pytest.mark.parametrize("rows", [(DECODE,), (DECODE, CACHED)])
def test_without_large_chunks_nothing_is_said_of_long_prompts(rows: tuple[StepRecord, ...]) -> None:
    fit = Fit(fitted_on=("4R",), checked_on=(), command="", range=SEEN, steps=checked(*rows))
    assert fit.reach == FittedRange(context_tokens=131_072, new_tokens=SEEN.new_tokens, qps=SEEN.qps)
    written = profile_of(costs=COSTS, fit=fit)
    assert decode_profile(encode(written)) == written


@pytest.mark.parametrize("rows", [(), (SMALL,), (SKIPPED,)])
def test_nothing_to_compare_is_an_error(rows: tuple[StepRecord, ...]) -> None:
    with pytest.raises(FormatError, match=r"s\.gz: holds no measured step that is larger than what the profile was"):
        larger(steps(*rows), SEEN, "s.gz")


def test_the_shipped_profile_says_how_far_its_law_is_from_measured_steps() -> None:
    shipped = find("h100-llama-3.1-8b")
    assert shipped.fit is not None
    path = SOURCE / "h100-engine-steps.jsonl.gz"
    seen = shipped.fit.range
    assert shipped.fit.steps == check(shipped.costs, larger(load(path), seen, path.name), seen, path.name)
    assert shipped.fit.steps.holds
    assert shipped.gpu == shipped.fit.steps.gpu
    assert said(shipped.fit.steps) in (SOURCE.parents[1] / "docs" / "calibration.md").read_text()


def test_steps_that_cannot_be_used_are_told_before_the_fit(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}"))
    out = tmp_path / "mine.json"
    code, output = run(GRID, "--evaluations", 0, "--jobs", 1, "--steps", path, "--out", out)
    assert (code, "steps.jsonl.gz" in output, out.exists()) == (1, True, False), output


def run(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(command, [str(each) for each in arguments])
    return result.exit_code, " ".join(result.output.split())


def test_check_takes_steps_of_a_fitted_and_of_a_computed_profile() -> None:
    for gpu in ("h100", "h200"):
        code, output = run("--check", f"{gpu}-llama-3.1-8b", SOURCE / f"{gpu}-engine-steps.jsonl.gz")
        assert (code, "steps were measured by themselves" in output) == (0, True), output


@pytest.mark.parametrize(
    ("rows", "arguments", "wanted"),
    [
        ([], [], "engine steps are no whole requests: give them to --steps or --check"),
        ([], ["--check", "h100-llama-3.1-8b"], "kind: must be 'ppd-engine-steps', got 'other'"),
        ([], ["--check", "h999"], "h999"),
        ([], ["--check", "h100-llama-3.1-8b", "--steps", GRID], "--steps: with --check, give the steps as SOURCE"),
    ],
)
def test_wrong_files_and_names_are_one_clear_error(
    tmp_path: Path, rows: list[object], arguments: list[str], wanted: str
) -> None:
    path = tmp_path / "steps.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"version": 1, "kind": "other"}).encode() + b"\n"))
    code, output = run(*arguments, path)
    assert code == 1
    assert wanted in output
