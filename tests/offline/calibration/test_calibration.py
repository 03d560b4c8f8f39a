"""Calibration: costs are found again, errors are what they say, and the source's own habits are read off it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from ppd.offline.calibration.errors import errors, markdown
from ppd.offline.calibration.fit import Simulations
from ppd.offline.calibration.observations import Observation, from_sweep
from ppd.offline.calibration.sources import Region, open_source
from ppd.offline.cli.calibrate import command
from ppd.offline.experiment.plan import plan
from ppd.offline.experiment.records import Origin, Outcome, RunResult
from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.simulation.setup import Setup
from ppd.offline.simulation.simulate import simulate
from ppd.offline.sweep import grid_file
from ppd.offline.sweep.folder import SweepFolder
from ppd.proxy.errors import FormatError
from ppd.proxy.laws.profile_file import ProfileFile, Status, encode, load
from ppd.proxy.laws.step_time import EngineProfile
from tests.support.stepped_engine import profile_of

TRUTH = EngineProfile(
    step_s=12e-3,
    decode_sequence_s=0.2e-3,
    prefill_token_s=60e-6,
    request_s=35e-3,
    request_token_s=15e-6,
    transfer_s=4e-3,
    send_s=20e-3,
    transfer_bytes_per_s=5e9,
    context_token_s=50e-9,
)
PROFILE = profile_of(name="truth", costs=TRUTH)
ORIGIN = Origin(backend="simulate", engine="ppd simulator", model="m", gpu="g")
HEADER = (
    "config,workload,qps,n_t1,n_t2,t1_ttft_avg,t1_ttft_p50,t1_ttft_p99,t2_ttft_avg,t2_ttft_p50,t2_ttft_p99,"
    "t1_tpot_avg,t2_tpot_avg,t2_tpot_p99,tok_s,req_s,success_pct,duration_s\n"
)


@cache
def measured() -> tuple[RunResult, ...]:
    """A small sweep of an engine whose costs are known."""
    results = []
    for topology, x in (("1R", None), ("1P_1D", 0.0), ("1P_1D", 1.0)):
        for context, new, output in ((128, 16, 32), (1024, 256, 64), (512, 64, 200), (2048, 512, 32)):
            workload = Workload(
                first=Profile(name=f"c{context}", new_tokens=context, output_tokens=32),
                later=Profile(name=f"n{new}", new_tokens=new, output_tokens=output),
            )
            run = Run(topology=topology, x=x, workload=workload, qps=2.0, seconds=8.0)
            records = simulate(run, Setup(profile=PROFILE))
            results.append(
                RunResult(run=run, outcome=Outcome.FINISHED, origin=ORIGIN, started="", wall_s=0.0, records=records)
            )
    return tuple(results)


def saved(folder: Path, results: Sequence[RunResult]) -> Path:
    sweep = SweepFolder.create(folder, grid_file.read("quick"), ORIGIN, "2026-01-01T00:00:00Z")
    for result in results:
        sweep.save(result)
    return folder


@pytest.mark.e2e  # the whole command: seconds of computing
def test_a_fit_comes_near_and_predicts_what_it_has_not_seen(tmp_path: Path) -> None:
    folder = saved(tmp_path / "sweep", measured())
    output = tmp_path / "profile.json"
    page = tmp_path / "page.md"
    flags = ("--out", str(output), "--document", str(page), "--jobs", "1", "--evaluations", "6")
    done = CliRunner().invoke(command, [str(folder), *flags], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    profile = load(output)
    assert profile.status is Status.FITTED
    assert profile.costs.step_s == pytest.approx(TRUTH.step_s, rel=0.05)
    assert profile.fit is not None
    assert {check.config for check in profile.fit.checked_on} == {"1R", "1P_1D", "1P_1pD"}
    assert all(check.ttft_error_median < 0.1 and check.tpot_error_median < 0.05 for check in profile.fit.checked_on)
    assert "`step_s`" in page.read_text()
    seen, unseen = _mean_ttft(PROFILE), _mean_ttft(profile)
    assert unseen == pytest.approx(seen, rel=0.1)


def _mean_ttft(profile: ProfileFile) -> float:
    """Of a workload, load and topology that nothing was fitted to."""
    workload = Workload(
        first=Profile(name="unseen", new_tokens=300, output_tokens=100),
        later=Profile(name="unseen", new_tokens=600, output_tokens=50),
    )
    records = simulate(Run(topology="1P_2D", x=0.5, workload=workload, qps=4.0), Setup(profile=profile))
    times = [record.ttft_s for record in records if record.ttft_s is not None]
    return sum(times) / len(times)


def test_a_cell_that_lost_requests_is_not_fitted_to() -> None:
    results = measured()[:2]
    broken = tuple(
        record if record.conversation else replace(record, status=500, error="gone") for record in results[0].records
    )
    lossy = RunResult(
        run=results[0].run, outcome=Outcome.FINISHED, origin=ORIGIN, started="", wall_s=0.0, records=broken
    )
    failed = RunResult(
        run=results[1].run, outcome=Outcome.FAILED, origin=ORIGIN, started="", wall_s=0.0, records=(), reason="died"
    )
    assert len(from_sweep(results)) == 2
    assert from_sweep([lossy, failed]) == []


def test_a_sweep_without_evidence_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="holds no cell whose requests all finished"):
        open_source(saved(tmp_path / "sweep", []))


def test_an_unknown_configuration_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "sweep", measured())
    done = CliRunner().invoke(command, [str(folder), "--fit-on", "9P_9D"])
    assert done.exit_code == 1
    assert "--fit-on 9P_9D" in done.output
    assert "1P_1pD" in done.output


SMALL = "small_tiny,{qps},40,40,100,100,120,50,30,130,8,8,8,1,1,100,10\n"


@pytest.mark.parametrize(
    ("row", "flags", "message"),
    [
        ("2P_2D," + SMALL.format(qps=4), (), "no cell of 4R, 1P_3D, 1P_3pD"),
        ("4R," + SMALL.format(qps=20), (), "no cell of 4R"),  # beyond the regions to which is fitted
        ("4R," + SMALL.format(qps=4), ("--name", "a b"), "name = 'a b'"),
        ("4R," + SMALL.format(qps=4), ("--name", "x" * 101), "name"),
    ],
)
def test_what_cannot_come_to_a_profile_is_refused_before_the_fit(
    tmp_path: Path, row: str, flags: tuple[str, ...], message: str
) -> None:
    path, out = tmp_path / "rows.csv", tmp_path / "out.json"
    path.write_text(HEADER + row)
    done = CliRunner().invoke(command, [str(path), "--out", str(out), "--jobs", "1", *flags], catch_exceptions=False)
    assert done.exit_code == 1
    assert done.output.startswith("Error: ")
    assert message in done.output
    assert not out.exists()


def test_errors_are_medians_of_shares_with_the_bias_beside_them() -> None:
    run = Run(topology="1R", workload=measured()[0].run.workload, qps=1.0)
    cells = [Observation("1R", "c", 1.0, 10, 0.1, 0.1, 0.01, (run,)) for _ in range(3)]
    simulated = np.array([[0.1, 0.11, 0.01], [0.1, 0.12, 0.01], [0.2, 0.07, 0.012]])
    (line,) = errors(cells, simulated, "everywhere", ["1R", "absent"])
    assert (line.cells, line.region) == (3, "everywhere")
    assert line.ttft_median == pytest.approx(0.2)
    assert line.ttft_bias == pytest.approx(0.1)
    assert line.ttft_p90 == pytest.approx(0.28)
    assert line.tpot_median == pytest.approx(0.0)
    assert line.first_ttft_median == pytest.approx(0.0)
    assert "| 1R (used) | 3 | 20.0%, 28.0%, +10.0% |" in markdown([line], ["1R"])


def test_a_published_cell_is_simulated_with_as_many_conversations(tmp_path: Path) -> None:
    rows = [
        "1P_3D,small_tiny,4,37,37,100,100,120,130,130,150,8,8,8,1,1,100,10",
        "1P_3pD,small_tiny,4,40,40,100,100,120,50,30,130,8,8,8,1,1,100,10",
    ]
    path = tmp_path / "rows.csv"
    path.write_text(HEADER + "\n".join(rows) + "\n")
    split, local = open_source(path).observations
    assert [len(plan(run)) for run in split.runs] == [37] * 2
    assert [len(plan(run)) for run in local.runs] == [40] * 2
    assert {run.seed for run in split.runs}.isdisjoint(run.seed for run in local.runs)  # each its own arrivals


def test_a_profile_is_checked_without_a_fit(tmp_path: Path) -> None:
    folder, profile = saved(tmp_path / "sweep", measured()), tmp_path / "truth.json"
    profile.write_bytes(encode(PROFILE))
    done = CliRunner().invoke(command, [str(folder), "--check", str(profile), "--jobs", "1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "| 1P_1pD | 4 | 0.0%, 0.0%, +0.0% | 0.0%, 0.0%, +0.0% | 0.0% |" in done.output
    assert "are in the measured order" in done.output
    absent = CliRunner().invoke(command, [str(folder), "--check", "absent"])
    assert absent.exit_code == 1
    assert "profile = 'absent'" in absent.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("config,workload\n", "column qps is missing"),
        (HEADER + "4R,odd_tiny,1,1,1,1,1,1,1,1,1,1,1,1,1,1,100,1\n", "line 2: workload 'odd_tiny'"),
        (HEADER, "holds no cell whose requests all finished"),
        ("\x00", "is missing"),
    ],
)
def test_rows_that_are_none_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(FormatError, match=message):
        open_source(path)


def test_regions_take_their_bounds_from_above() -> None:
    run = Run(topology="1R", workload=measured()[0].run.workload, qps=1.0)
    cells = [Observation("1R", "small", qps, 1, 1.0, 1.0, 1.0, (run,)) for qps in (2.0, 8.0, 10.0)]
    assert [one.qps for one in Region("r", "small", above_qps=2, to_qps=8).of(cells)] == [8.0]
    assert Region("r", "large").of(cells) == []


def test_simulations_keep_the_order_of_their_observations() -> None:
    observations = from_sweep(measured())
    with Simulations(1) as simulations:
        means = simulations.means(observations, Setup(profile=PROFILE))
    assert means == pytest.approx(np.array([one.means for one in observations]))


@pytest.mark.parametrize(
    ("connector", "transfers"),
    [
        ("nixl", "missing"),
        ("missing blocks pulled", "missing"),
        ("p2p_nccl", "whole"),
        ("whole prompts pushed", "whole"),
    ],
)
def test_a_sweep_is_simulated_as_it_was_measured(tmp_path: Path, connector: str, transfers: str) -> None:
    origin = Origin(backend="target", engine="vllm", gpu="g", gpu_count=8, connector=connector)
    sweep = SweepFolder.create(tmp_path / "sweep", grid_file.read("quick"), origin, "2026-01-01T00:00:00Z")
    for result in measured()[3:]:
        sweep.save(replace(result, origin=origin))
    profile = open_source(sweep.path).setup.profile
    assert (profile.transfers, profile.gpu_count) == (transfers, 4)  # of two workers
    assert "kv_capacity_tokens is assumed to be 400,000" in profile.note
    told = open_source(sweep.path, 50_000).setup.profile
    assert told.kv_capacity_tokens == 50_000
    assert "assumed" not in told.note


def test_shares_between_are_configurations_of_their_own() -> None:
    split, local = measured()[4], measured()[8]
    between = replace(split, run=replace(split.run, x=0.5))
    assert [one.config for one in from_sweep([split, between, local])] == ["1P_1D", "1P_1D-x0.5", "1P_1pD"]
