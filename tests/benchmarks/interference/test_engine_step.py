"""From times of steps to an engine profile; measuring them is tested where PyTorch is (tests/vllm)."""

from __future__ import annotations

import gzip
import json
from argparse import ArgumentParser
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import msgspec
import pytest

from benchmarks.interference.engine_step import measure
from benchmarks.interference.engine_step.commands import add_arguments
from benchmarks.interference.engine_step.fit import TERMS, fit_steps, markdown, profile
from benchmarks.interference.engine_step.network import NetworkShape, StepPoint
from ppd.offline.calibration.steps import StepRecord, Steps, decode
from ppd.proxy.errors import ConfigError, FormatError
from ppd.proxy.laws.profile_file import Status, Transfers
from ppd.proxy.laws.profile_file import decode as decode_profile
from ppd.proxy.laws.profile_file import encode as encode_profile
from ppd.proxy.laws.step_time import EngineProfile, step_time_s
from tests.support.stepped_engine import profile_of

TRUE = EngineProfile(
    step_s=6e-3, decode_sequence_s=2e-5, context_token_s=3e-8, prefill_token_s=1.6e-5, attention_pair_s=1.5e-9
)
POINTS = tuple(measure.points(measure.parser().parse_args(["--output", "x"])))
HEAD = {
    "version": 1,
    "kind": "ppd-engine-steps",
    "name": "Llama-3.1-8B",
    "shape": asdict(NetworkShape()),
    "device": "NVIDIA H100 80GB HBM3",
    "threads": 0,
    "memory_bytes": 8.5e10,
    "dtype": "bfloat16",
    "value_bytes": 2,
    "torch": "2.13.0",
    "cuda": "12.9",
    "graphs": True,
    "kv_tokens": 400_000,
    "started": "2026-01-01T00:00:00+00:00",
}


def took(point: StepPoint, *noise: float) -> dict[str, Any]:
    step = StepRecord(**asdict(point))
    seconds = step_time_s(TRUE, *step.load)
    return asdict(point) | {"seconds": [seconds * (1 + share) for share in noise or (0.0,)]}


def file(rows: Iterable[object], **head: object) -> bytes:
    return gzip.compress("".join(json.dumps(row) + "\n" for row in [HEAD | head, *rows]).encode())


STEPS = decode(file(took(point) for point in POINTS))


def test_costs_are_found_again_from_the_times_that_they_make() -> None:
    fit = fit_steps(STEPS.steps, EngineProfile())
    for name in TERMS:
        assert getattr(fit.costs, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert fit.error(1.0) == pytest.approx(0, abs=1e-6)


def test_a_slow_repeat_does_not_count() -> None:
    rows = [took(point, 0.0, 0.001, 20.0) for point in POINTS]
    fit = fit_steps(decode(file(rows)).steps, EngineProfile())
    assert fit.costs.step_s == pytest.approx(TRUE.step_s, rel=0.01)


def test_no_cost_is_below_nothing() -> None:
    rows = [took(point) for point in POINTS]
    for row in rows:  # the more sequences, the faster
        row["seconds"] = [row["seconds"][0] / (1 + row["decode"])]
    costs = fit_steps(decode(file(rows)).steps, EngineProfile()).costs
    assert min(getattr(costs, name) for name in TERMS) >= 0


def test_points_that_were_not_measured_are_left_out() -> None:
    rows = [took(point) for point in POINTS[:10]] + [asdict(point) | {"skipped": "no room"} for point in POINTS[10:]]
    steps = decode(file(rows))
    assert len(fit_steps(steps.steps, EngineProfile()).residuals) == 10
    with pytest.raises(ConfigError, match="4 points were measured, the law has 5 costs"):
        fit_steps(steps.steps[:4], EngineProfile())


def test_a_profile_says_what_was_measured_and_what_was_not() -> None:
    made, _ = profile(STEPS, None, "mine")
    assert made.status is Status.FITTED, "no cost by itself, and some not at all"
    assert made.network == "not measured"
    assert made.gpu == "NVIDIA H100 80GB HBM3"
    assert made.kv_capacity_tokens == 400_000
    assert made.costs.kv_bytes_per_token == 131_072
    assert made.costs.request_s == EngineProfile().request_s
    for name in set(EngineProfile.__slots__) - {*TERMS, "kv_bytes_per_token"}:
        assert name in made.note.partition(": not measured, from the built-in profile")[0], name
    assert decode_profile(encode_profile(made)) == made


def test_what_a_step_does_not_have_comes_from_the_base() -> None:
    base = profile_of(
        name="fitted",
        costs=replace(EngineProfile(), request_s=1.0, transfer_bytes_per_s=1e9, step_s=9.0),
        kv_capacity_tokens=1000,
        transfers=Transfers.WHOLE,
        network="100 Gb/s",
    )
    made, _ = profile(STEPS, base, "mine")
    assert (made.costs.request_s, made.costs.transfer_bytes_per_s) == (1.0, 1e9)
    assert made.costs.step_s == pytest.approx(TRUE.step_s)
    assert (made.transfers, made.network) == (Transfers.WHOLE, "100 Gb/s")
    assert "from fitted" in made.note


def test_two_gpus_give_a_transfer_rate() -> None:
    copies = [{"copy": name, "bytes": 10**9, "seconds": [0.1, 0.01, 0.02]} for name in ("host-to-gpu", "gpu-to-gpu")]
    made, _ = profile(decode(file([*(took(point) for point in POINTS), *copies])), None, "mine")
    assert made.costs.transfer_bytes_per_s == pytest.approx(5e10)
    assert "transfer_bytes_per_s" not in made.note.partition(": not measured")[0]
    assert "transfer_s" in made.note.partition(": not measured")[0]


def test_the_table_shows_every_point_and_why_some_are_missing() -> None:
    rows = [took(point) for point in POINTS[:20]] + [asdict(POINTS[20]) | {"skipped": "out of memory"}]
    steps = decode(file(rows))
    made, fit = profile(steps, None, "mine")
    text = markdown(made, fit, steps.steps[20:], None)
    assert text.count("\n| ") == len(TERMS) + 1 + 1 + 1 + 20 + 1  # two heads, two rules, costs, points
    assert "not measured, out of memory" in text


@pytest.mark.parametrize(
    ("rows", "head", "said"),
    [
        ([], {"version": 2}, "version: must be 1, got 2"),
        ([], {"kind": "x"}, "kind: must be 'ppd-engine-steps', got 'x'"),
        ([], {"speed": 1}, "speed"),
        ([{"decode": 1}], {}, "context"),
        ([{"decode": 1, "context": 1, "prefill": 0, "cached": 0, "seconds": []}], {}, "seconds"),
        ([{"copy": "gpu-to-gpu", "bytes": 0, "seconds": [1]}], {}, "bytes"),
    ],
)
def test_wrong_records_are_named(rows: list[object], head: dict[str, object], said: str) -> None:
    with pytest.raises(FormatError, match=said):
        decode(file(rows, **head))


def test_the_default_shape_is_the_models() -> None:
    assert NetworkShape().weights == 8_030_261_248
    assert 2 * NetworkShape().kv_values_per_token == 131_072


def test_the_grid_has_each_part_alone_and_both_together() -> None:
    assert any(point.decode and not point.prefill for point in POINTS)
    assert any(point.prefill and not point.decode and point.cached for point in POINTS)
    assert any(point.prefill and point.decode for point in POINTS)
    assert len(set(POINTS)) == len(POINTS)


def test_arguments_reach_the_measuring_program_as_they_were_given() -> None:
    top = ArgumentParser()
    add_arguments(top)
    args = top.parse_args(["--layers", "2", "--chunks", "16", "32", "--mixed-batches", "--no-graphs", "--base", "b"])
    passed = measure.parser().parse_args(["--output", "x", *measure.argv_of(args)])
    assert (passed.layers, passed.chunks, passed.mixed_batches, passed.no_graphs) == (2, [16, 32], [], True)
    assert (passed.hidden, tuple(passed.decode_batches)) == (4096, (1, 2, 4, 8, 16, 32, 64, 128, 256))


def test_copies_and_steps_are_told_apart() -> None:
    steps: Steps = decode(file([took(POINTS[0]), {"copy": "gpu-to-gpu", "bytes": 8, "seconds": [1.0]}]))
    assert (len(steps.steps), len(steps.copies)) == (1, 1)
    assert msgspec.to_builtins(steps.steps[0])["decode"] == POINTS[0].decode
