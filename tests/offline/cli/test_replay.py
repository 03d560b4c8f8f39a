"""`ppd replay` as a program: what it prints, and what it refuses."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from ppd.offline.cli.replay import command
from tests.offline.replay.receipts import line_of, receipt

PROFILE = ("--profile", "h100-llama-3.1-8b")
TURNS = [receipt("P1 D1" if turn % 2 else "D1", 2.0 * turn, turn=turn) for turn in range(1, 6)]


def run(file: Path, *flags: str) -> Result:
    return CliRunner().invoke(command, [str(file), *flags])


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "receipts.jsonl"
    file.write_bytes(b"".join(map(line_of, TURNS)))
    return file


def test_it_tells_what_changes_and_by_how_much(log: Path) -> None:
    result = run(log, *PROFILE, "--mode", "always_local", "--slo", "ttft=0.01,ttft_factor=1")
    assert result.exit_code == 0, result.output
    assert "5 turns of 1 sessions, decided again in mode always_local" in result.output
    assert "over the workers that they went to: 1P 1D\n" in result.output
    assert "2 decisions change (40.0%)" in result.output
    assert "2  SPLIT to LOCAL" in result.output
    assert "mean TTFT, ms" in result.output
    assert "too few sessions" in result.output
    assert "measured TTFT against predicted, 5 turns: median error " in result.output


def test_workers_that_no_turn_went_to_are_said_to_be_missing(log: Path) -> None:
    """Else a mode that splits every turn seems to change little."""
    log.write_bytes(b"".join(line_of(receipt("D1", 2.0 * turn, turn=turn)) for turn in range(1, 4)))
    output = run(log, *PROFILE, "--mode", "always_split").output
    assert "over the workers that they went to: 1D; no P, so none of these turns can be SPLIT by any rules\n" in output


def test_figures_come_as_json_too_and_damage_on_standard_error(log: Path) -> None:
    log.write_bytes(b"{}\n" + log.read_bytes() + b'{"id"')
    result = run(log, *PROFILE, "--mode", "weights", "--w-tpot", "3", "--json")
    found = msgspec.json.decode(result.stdout)
    assert (found["turns"], found["damaged"]) == (5, 2)
    assert "line 1 is skipped" in result.stderr
    assert "line 7 is skipped" in result.stderr


def test_a_compressed_log_is_a_log(log: Path) -> None:
    log.write_bytes(gzip.compress(log.read_bytes()))
    assert "5 turns of 1 sessions" in run(log, *PROFILE, "--mode", "always_local").output


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--mode", "slo"), "profile: must name an engine profile"),
        ((*PROFILE, "--w-tpot", "-1"), "w_tpot = -1.0: must be"),
        ((*PROFILE, "--slo", "fast"), "--slo: must be like ttft=0.5"),
        (("--profile", "none"), "profile = 'none': must be"),
        ((*PROFILE, "--table", "none"), "table = 'none'"),
        ((*PROFILE, "--long-prefill-tokens", "-1"), "long_prefill_tokens = -1: must be"),
    ],
)
def test_what_cannot_be_used_is_one_clear_error(log: Path, flags: tuple[str, ...], said: str) -> None:
    result = run(log, *flags)
    assert result.exit_code == 1
    assert said in result.output


@pytest.mark.parametrize("content", [b"", b"\n"])
def test_an_empty_log_is_said_to_be_empty(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "receipts.jsonl"
    file.write_bytes(content)
    result = run(file, *PROFILE)
    assert result.exit_code == 1
    assert f"{file}: is empty: a receipt is written when its turn ends" in result.output


@pytest.mark.parametrize("content", [b"{}\n", b"\0" * 100, line_of(receipt("D1", route="", legs=[]))])
def test_a_log_with_nothing_to_decide_is_an_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "receipts.jsonl"
    file.write_bytes(content)
    result = run(file, *PROFILE)
    assert result.exit_code == 1
    assert "no line is the receipt of a turn" in result.output


def test_rules_may_come_from_a_config(log: Path, tmp_path: Path) -> None:
    config = tmp_path / "ppd.toml"
    config.write_text('mode = "always_split"\nprofile = "h100-llama-3.1-8b"\n')
    assert "in mode always_split" in run(log, "--config", str(config)).output
    assert "in mode always_local" in run(log, "--config", str(config), "--mode", "always_local").output


def test_a_cap_of_long_prompts_is_how_the_engines_were_started(log: Path) -> None:
    """A short prompt came while the one worker computed a long one: with a cap it did not wait for that."""
    long = receipt("R1", 0.0, session="long", estimated_prompt_tokens=60_000, prompt_tokens=60_000)
    long.legs[0].first_event_s = 9.0
    log.write_bytes(line_of(long) + line_of(receipt("R1", 0.1)))
    without, capped = (
        msgspec.json.decode(run(log, *PROFILE, "--mode", "least_ttft", "--json", *flags).stdout)["ttft_s"]
        for flags in ((), ("--long-prefill-tokens", "2048"))
    )
    assert capped["before"] < without["before"]
