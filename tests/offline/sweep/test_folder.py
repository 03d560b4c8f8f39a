from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec
import pytest

from ppd.offline.experiment.records import Origin
from ppd.offline.sweep.folder import How, SweepFolder
from ppd.proxy.errors import ConfigError, FormatError
from tests.support.sweep import ORIGIN, failed, finished, full_disk, grid, run

STARTED = "2026-01-01T00:00:00+00:00"


def created(path: Path) -> SweepFolder:
    return SweepFolder.create(path / "sweep", grid(), ORIGIN, STARTED)


def test_what_is_saved_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    folder = created(tmp_path)
    saved = [finished(run(0)), failed(run(1)), finished(run(0, topology="2R", x=None))]
    for result in saved:
        folder.save(result)
    again = SweepFolder(folder.path)
    assert list(again.results()) == saved
    assert (again.sweep.grid, again.sweep.origin, again.sweep.started) == (grid(), ORIGIN, STARTED)


def test_it_knows_what_was_done(tmp_path: Path) -> None:
    folder = created(tmp_path)
    folder.save(finished(run(0)))
    assert folder.path_of(run(0)).exists()
    assert not folder.path_of(run(1)).exists()
    assert folder.path_of(run(0)) == folder.path / "runs/1P_1D-x0/small_tiny/q1-s0.jsonl.gz"


def test_a_sweep_is_begun_once(tmp_path: Path) -> None:
    folder = created(tmp_path)
    with pytest.raises(ConfigError, match="holds a sweep already; --resume goes on with it"):
        SweepFolder.create(folder.path, grid(), ORIGIN, STARTED)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"qps": (1.0,)}, "holds another grid: qps: [1.0,4.0] there, [1.0] asked for"),
        ({"seconds": 20.0}, "holds another grid: seconds: 10.0 there, 20.0 asked for"),
        ({"arrivals": "azure.csv"}, 'holds another grid: arrivals: "poisson" there'),
    ],
)
def test_another_grid_is_refused(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    folder = created(tmp_path)
    with pytest.raises(ConfigError) as caught:
        folder.take_up(grid(**changes), ORIGIN)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"backend": "target"}, "backend 'simulate' there, 'target' now"),
        ({"engine": "vllm 0.32.0"}, "engine 'fake' there"),
        ({"model": "other"}, "model 'm' there"),
        ({"gpu": "A100"}, "gpu 'H100' there, 'A100' now"),
    ],
)
def test_figures_of_another_engine_are_refused(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    folder = created(tmp_path)
    other = msgspec.structs.replace(ORIGIN, **changes)
    with pytest.raises(ConfigError, match=said):
        folder.take_up(grid(), other)
    with pytest.raises(ConfigError, match=said):
        folder.save(msgspec.structs.replace(finished(run(0)), origin=other))
    assert not folder.path_of(run(0)).exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus_per_worker": "2"}, "measured in another way: gpus_per_worker '1' there, '2' now"),
        ({"engine_args": ""}, "engine_args '--max-num-seqs 8' there, '' now"),
        ({"api": "chat"}, "api 'completions' there, 'chat' now"),
        ({"tokenizer_sha256": "00"}, "another tokenizer now"),
        ({"profile_sha256": "00"}, "another profile now"),
        ({"arrivals_sha256": "00"}, "another arrivals now"),
    ],
)
def test_runs_measured_in_another_way_are_refused(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    how = How(gpus_per_worker="1", engine_args="--max-num-seqs 8", api="completions")
    folder = SweepFolder.create(tmp_path, grid(), ORIGIN, STARTED, how)
    folder.take_up(grid(), ORIGIN, how)
    with pytest.raises(ConfigError, match=said):
        SweepFolder(tmp_path).take_up(grid(), ORIGIN, msgspec.structs.replace(how, **changes))


def test_a_larger_topology_of_the_same_engine_belongs_to_the_sweep(tmp_path: Path) -> None:
    folder = created(tmp_path)
    larger = msgspec.structs.replace(ORIGIN, gpu_count=8, note="another rack")
    folder.take_up(grid(), larger)
    folder.save(msgspec.structs.replace(finished(run(0)), origin=larger))
    assert folder.path_of(run(0)).exists()


def test_what_is_not_known_at_the_start_is_taken_from_the_first_run(tmp_path: Path) -> None:
    unknown = msgspec.structs.replace(ORIGIN, engine="", gpu="")
    folder = SweepFolder.create(tmp_path, grid(), unknown, STARTED)
    folder.save(finished(run(0)))
    again = SweepFolder(tmp_path)
    assert again.sweep.origin == ORIGIN
    with pytest.raises(ConfigError, match="engine 'fake' there"):
        again.take_up(grid(), Origin(backend="simulate", engine="other"))


def test_more_seeds_may_be_asked_for_later(tmp_path: Path) -> None:
    folder = created(tmp_path)
    folder.take_up(grid(seeds=3, max_seeds=5), ORIGIN)
    assert SweepFolder(folder.path).sweep.grid.max_seeds == 5


def test_a_folder_without_a_sweep_is_told(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"must be a sweep's folder: it has no sweep\.json"):
        SweepFolder(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version: must be 1, got 2"),
        ({"kind": "other"}, "kind: must be 'ppd-sweep', got 'other'"),
        ({"surprise": 1}, "unknown field `surprise`"),
        ({"grid": {}}, "missing required field `arms`"),
    ],
)
def test_a_sweep_of_another_version_is_told_with_its_path(tmp_path: Path, change: dict[str, object], said: str) -> None:
    document = created(tmp_path).path / "sweep.json"
    document.write_text(json.dumps(json.loads(document.read_text()) | change))
    with pytest.raises(FormatError) as caught:
        SweepFolder(document.parent)
    assert str(document) in caught.value.message
    assert said in caught.value.message


def test_a_sweep_nested_too_deep_is_told_with_its_path(tmp_path: Path) -> None:
    document = created(tmp_path).path / "sweep.json"
    document.write_text('{"version": 1, "kind": "ppd-sweep", "deep": ' + "[" * 100_000)
    with pytest.raises(FormatError, match=r"sweep\.json: "):
        SweepFolder(document.parent)


def damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    match how:
        case "cut":
            path.write_bytes(whole[: len(whole) // 2])
        case "garbage":
            path.write_bytes(b"no gzip")
        case "version":
            path.write_bytes(gzip.compress(gzip.decompress(whole).replace(b'"version":1', b'"version":7', 1)))
        case "moved":
            path.rename(path.with_name("q1-s5.jsonl.gz"))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("cut", "not a ppd-run file"),
        ("garbage", "not a ppd-run file"),
        ("version", "version: must be 1, got 7"),
        ("moved", "holds another run, 1P_1D-x0/small_tiny/q1-s0"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_and_kept_aside(tmp_path: Path, how: str, said: str) -> None:
    folder = created(tmp_path)
    folder.save(finished(run(0)))
    folder.save(finished(run(1)))
    damage(folder.path_of(run(0)), how)
    with pytest.raises(FormatError, match=said):
        list(folder.results())
    damaged: list[tuple[Path, str]] = []
    good = list(folder.readable(lambda path, reason: damaged.append((path, reason))))
    assert [result.run for result in good] == [run(1)]
    ((path, reason),) = damaged
    assert said in reason and str(path) in reason
    kept = folder.set_aside(path)
    assert kept.exists() and not path.exists()
    assert [result.run for result in folder.results()] == [run(1)]


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    folder = created(tmp_path)
    folder.save(finished(run(0)))
    files = sorted(path for path in folder.path.rglob("*") if path.is_file())
    with full_disk(100), pytest.raises(FormatError, match=r"q1-s1\.jsonl\.gz: cannot be written: File too large"):
        folder.save(finished(run(1)))
    assert sorted(path for path in folder.path.rglob("*") if path.is_file()) == files
    assert [result.run for result in folder.results()] == [run(0)]
