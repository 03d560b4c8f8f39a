"""What a sweep's folder keeps of the flags, so that it is resumed in the same way."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppd.offline.cli.build_table import main
from ppd.offline.cli.build_table_executors import how_of
from ppd.offline.cli.build_table_flags import BuildTableFlags
from ppd.offline.sweep.folder import How


def how(*argv: str, trace: tuple[float, ...] | None = None) -> How:
    with main.make_context("ppd-build-table", [*argv, "--out", "x"]) as context:
        return how_of(BuildTableFlags(**context.params, admin_key=""), trace)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("gpus_per_worker", ("--launch",), ("--launch", "--tensor-parallel", "2")),
        ("engine_args", ("--launch",), ("--launch", "--engine-arg=--max-num-seqs", "--engine-arg=8")),
        ("api", ("--target", "http://a"), ("--target", "http://a", "--api", "chat")),
        ("tokenizer_sha256", ("--target", "http://a"), ("--target", "http://a", "--tokenizer", "t")),
        ("profile_sha256", ("--simulate",), ("--simulate", "--hardware", "a100-llama-3.1-8b")),
        ("profile_sha256", ("--simulate",), ("--simulate", "--transfers", "missing")),
    ],
)
def test_flags_that_change_figures_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, one: tuple[str, ...], other: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.json").write_text("{}")
    assert {field for field in How.__struct_fields__ if getattr(how(*one), field) != getattr(how(*other), field)} == {
        name
    }


def test_a_trace_is_told_by_its_arrivals() -> None:
    first, second = how("--simulate", trace=(0.0, 1.0)), how("--simulate", trace=(0.0, 2.0))
    assert "" != first.arrivals_sha256 != second.arrivals_sha256
    assert how("--simulate").arrivals_sha256 == ""
