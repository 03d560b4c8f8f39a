"""Engine steps measured for real, on CPU, with the PyTorch that comes with vLLM: small shapes, the whole way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ppd.offline.calibration.steps import load as load_steps
from ppd.proxy.laws.profile_file import Status, load
from ppd.servers.vllm.cpu_install import ensure, unsupported_reason

ROOT = Path(__file__).parents[2]
SHAPE = (
    "--name tiny --layers 2 --hidden 128 --heads 8 --kv-heads 2 --head-dim 16 --mlp 256 --vocabulary 500 "
    "--dtype float32 --device cpu --threads 1"
).split()
GRID = (
    "--decode-batches 1 4 --decode-contexts 32 128 --chunks 8 32 --chunk-contexts 0 64 --mixed-batches 2 "
    "--step-repeats 3 --warm-ups 1"
).split()
# Attention against its definition: softmax over what each token may see, query heads shared in order by KV heads.
AGAINST_ITS_DEFINITION = """
import torch
from benchmarks.interference.engine_step.network import Network, NetworkShape, StepPoint

shape = NetworkShape(layers=1, hidden=64, heads=8, kv_heads=2, head_dim=16, mlp=64, vocabulary=50)

def plain(q, keys, values):                     # (8, 16), (2, seen, 16) -> (128,)
    out = []
    for head in range(8):
        k, v = keys[head // 4], values[head // 4]
        out.append(torch.softmax(k @ q[head] / 4.0, dim=0) @ v)
    return torch.cat(out)

def check(network, point):
    layer = network._layers[0]
    q, k, v = (torch.randn(point.decode + point.prefill, n, 16) for n in (8, 2, 2))
    start = point.decode * point.context * 32
    if point.decode:
        out = network._decode(point, layer, q[: point.decode], k[: point.decode], v[: point.decode])
        keys, values = network._views(layer, 0, (point.decode, 2, point.context, 16))
        for n in range(point.decode):
            assert torch.equal(keys[n, :, -1], k[n]) and torch.equal(values[n, :, -1], v[n])
            torch.testing.assert_close(out[n], plain(q[n], keys[n], values[n]))
    if point.prefill:
        first = point.decode
        out = network._prefill(point, layer, q[first:], k[first:], v[first:])
        own = network._views(layer, start, (2, point.prefill, 16))
        before = network._views(layer, start + point.prefill * 32, (2, point.cached, 16))
        keys, values = (torch.cat(both, dim=1) for both in zip(before, own))
        for n in range(point.prefill):
            seen = point.cached + n + 1
            assert torch.equal(keys[:, seen - 1], k[first + n])
            torch.testing.assert_close(out[n], plain(q[first + n], keys[:, :seen], values[:, :seen]))

network = Network(shape, kv_tokens=2200, device="cpu", dtype="float32")
for point in (
    StepPoint(3, 20, 0, 0),
    StepPoint(0, 0, 7, 0),
    StepPoint(0, 0, 7, 30),
    StepPoint(2, 20, 5, 11),
    StepPoint(1, 1024, 5, 768),  # in 4 and in 2 parts
):
    with torch.inference_mode():
        check(network, point)
        tokens = network.step(point, network.inputs(point), network.rotations(point))
    assert tokens.shape == (point.decode + bool(point.prefill),)
print("as defined")
"""


@pytest.fixture(scope="module")
def torch_python() -> str:
    if reason := unsupported_reason():
        pytest.skip(f"PyTorch for CPUs is not tested here: {reason}")
    return str(ensure(print).python)


def test_attention_is_what_it_is_defined_as(torch_python: str) -> None:
    result = subprocess.run(
        [torch_python, "-c", AGAINST_ITS_DEFINITION],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "as defined"


def test_steps_become_a_profile(torch_python: str, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "benchmarks.interference", "--torch", "--python", torch_python]
    asked = ["--output", str(tmp_path), "--profile-name", "tiny-cpu", *SHAPE, *GRID]
    result = subprocess.run([*program, *asked], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    steps = load_steps(tmp_path / "steps.jsonl.gz")
    assert len(steps.steps) == 4 + 4 + 2
    assert all(step.seconds is not None and len(step.seconds) == 3 for step in steps.steps)
    made = load(tmp_path / "tiny-cpu.json")
    assert made.status is Status.FITTED
    assert made.costs.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert made.gpu.startswith("CPU")
    assert "Engine steps: tiny on CPU" in (tmp_path / "tiny-cpu.md").read_text()


def test_points_without_room_are_kept_with_the_reason(torch_python: str, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "benchmarks.interference", "--torch", "--python", torch_python]
    asked = ["--output", str(tmp_path), *SHAPE, *GRID, "--kv-tokens", "300"]
    result = subprocess.run([*program, *asked], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    skipped = [step for step in load_steps(tmp_path / "steps.jsonl.gz").steps if step.seconds is None]
    assert [(step.decode, step.context) for step in skipped] == [(4, 128), (2, 128)]
    assert all("do not fit into 300" in step.skipped for step in skipped)
    assert "not measured" in (tmp_path / "engine-step.md").read_text()
