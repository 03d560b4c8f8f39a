"""`benchmarks/interference` as a program, against a simulated engine whose prefills are slow."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from benchmarks.interference.records import Experiment, TrialKind, load
from benchmarks.interference.slowdowns import SlowdownPoint, gather, measure
from ppd.proxy.laws.step_time import EngineProfile
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.launch import running_engine

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[3]
# A step of 10 ms; a prefill of 256 tokens stalls its neighbours for 51 ms, one of 768 tokens for 154 ms.
SLOW_PREFILLS = EngineProfile(step_s=0.01, prefill_token_s=2e-4, attention_pair_s=0, request_s=0, request_token_s=0)
SMALL = (
    "--repeats 2 --batch-sizes 3 --prefills 1 --sensitivity-batch 3 --contexts 512 --append-sizes 64 --new-tokens 256 "
    "--cached-tokens 128 --decode-context-tokens 128 --output-tokens 40"
).split()


async def interference(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.interference", *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    return process.returncode or 0, said.decode()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def points(folder: Path) -> dict[tuple[Experiment, TrialKind], SlowdownPoint]:
    head, results = load(folder / "interference.jsonl.gz")
    found = gather(measure(result, head.output_tokens) for result in results)
    return {(point.place.experiment, point.place.kind): point for point in found}


@pytest.mark.alone
async def test_slow_prefills_are_seen_by_their_neighbours(tmp_path: Path) -> None:
    async with running_engine(SimConfig(profile=SLOW_PREFILLS, time_scale=1)) as engine:
        code, said = await interference(
            *("--url", f"http://{engine.address}", "--model", "sim", "--output", str(tmp_path), *SMALL),
            *("--experiments", "batch", "context", "append"),
        )
    assert code == 0, said
    found = points(tmp_path)
    assert len(found) == 9
    assert {point.failed for point in found.values()} == {0}, said
    for experiment in Experiment:
        overlap = found[experiment, TrialKind.FULL].overlap
        assert overlap is not None and overlap.mean > 0
    # With its context cached a turn computes 256 tokens, without 768.
    full, append = (found[Experiment.CONTEXT, kind].stall_s for kind in (TrialKind.FULL, TrialKind.APPEND))
    assert full is not None and append is not None
    assert full.mean > 1.5 * append.mean > 0
    assert names(tmp_path) == {
        *("interference.jsonl.gz", "interference.md"),
        *(f"interference-{experiment}.png" for experiment in Experiment),
    }

    again = tmp_path / "again"
    code, said = await interference("--records", str(tmp_path / "interference.jsonl.gz"), "--output", str(again))
    assert code == 0, said
    assert (again / "interference.md").read_bytes() == (tmp_path / "interference.md").read_bytes()


async def test_a_cache_that_is_too_small_is_no_measurement(tmp_path: Path) -> None:
    small = SimConfig(profile=SLOW_PREFILLS, time_scale=0, num_blocks=24, max_model_len=384, block_size=16)
    async with running_engine(small) as engine:
        arguments = ["--url", f"http://{engine.address}", "--model", "sim", "--output", str(tmp_path), *SMALL]
        code, said = await interference(*arguments, "--new-tokens", "96")
    assert code == 0, said
    failed = [point for point in points(tmp_path).values() if point.failed]
    assert failed
    assert "context tokens were cached" in (tmp_path / "interference.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "other"], "a context could not be computed: status 404"),
        (["--model", "sim", "--repeats", "0"], "error: repeats = 0: must be at least 1"),
        (["--model", "sim", "--api-key-file", "nokey"], "error: api_key_file = 'nokey': must be a readable file"),
    ],
)
async def test_what_cannot_be_measured_is_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    async with running_engine(SimConfig()) as engine:
        url = f"http://{engine.address}"
        code, output = await interference("--url", url, "--output", str(tmp_path), *SMALL, *arguments)
    assert code == 1
    assert output.startswith("error: ")
    assert said in output
    assert len(output.splitlines()) == 1
    assert not names(tmp_path)


async def test_records_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"x")
    for flag in ("--records", "--published"):
        code, output = await interference(flag, str(tmp_path / "bad"), "--output", str(tmp_path / "out"))
        assert code == 1
        assert output.startswith(f"error: {tmp_path / 'bad'}: ")
        assert not (tmp_path / "out").exists()


async def test_without_pytorch_the_error_says_what_to_install(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    # -S: an interpreter without any installed package, whatever the one that runs the tests has.
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    code, output = await interference("--torch", "--python", str(bare), "--output", str(tmp_path / "out"))
    assert code == 1
    assert "PyTorch is not installed" in output
    assert "pip install torch" in output
    assert "Traceback" not in output
