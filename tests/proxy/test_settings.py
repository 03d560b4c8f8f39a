"""Changing settings while the proxy runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ppd.proxy.config import Lookup, Mode, build
from ppd.proxy.errors import ConfigError, PPDError
from ppd.proxy.settings import ConfigSource, Settings


def settings(tmp_path: Path, text: str) -> tuple[Settings, Path]:
    file = tmp_path / "ppd.toml"
    file.write_text(text)
    return Settings(build(file, {}), ConfigSource(file, {})), file


def test_new_weights_in_the_file_make_new_rules(tmp_path: Path) -> None:
    held, file = settings(tmp_path, "w_tpot = 1\n")
    file.write_text("w_tpot = 6\n")
    assert held.reload()
    scored = held.rules().scored
    assert scored is not None
    assert scored.weights.tpot == 6.0


def test_another_lookup_is_taken_while_the_proxy_runs(tmp_path: Path) -> None:
    held, file = settings(tmp_path, "")
    before = held.rules().scored
    assert before is not None
    assert before.rule is Lookup.NEAREST
    file.write_text('lookup = "interpolated"\n')
    assert held.reload()
    after = held.rules().scored
    assert after is not None
    assert after.rule is Lookup.INTERPOLATED


@pytest.mark.parametrize("text", ["w_tpot = -1\n", "w_tpot = ", 'table = "none"\n', "nonsense = 1\n"])
def test_a_bad_file_changes_nothing(tmp_path: Path, text: str) -> None:
    held, file = settings(tmp_path, "w_tpot = 2\n")
    before = held.rules()
    file.write_text(text)
    assert not held.reload()
    assert held.rules() is before
    assert held.config.w_tpot == 2.0


def test_a_deleted_file_changes_nothing(tmp_path: Path) -> None:
    held, file = settings(tmp_path, "w_tpot = 2\n")
    file.unlink()
    assert not held.reload()
    assert held.config.w_tpot == 2.0


def test_a_refused_change_leaves_the_config_as_it_was(tmp_path: Path) -> None:
    held, _ = settings(tmp_path, "")
    with pytest.raises(ConfigError, match="w_ttft"):
        held.change(w_ttft=-1.0)
    with pytest.raises(PPDError):
        held.change(table="none")
    assert (held.config.w_ttft, held.config.table) == (1.0, build(None, {}).table)


def test_only_mode_table_needs_a_table(tmp_path: Path) -> None:
    held, _ = settings(tmp_path, 'mode = "always_split"\ntable = "none"\n')
    assert held.rules().scored is None
    with pytest.raises(PPDError, match="none"):
        held.change(mode=Mode.TABLE)
    assert held.config.mode is Mode.ALWAYS_SPLIT


async def test_a_watched_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    held, file = settings(tmp_path, "w_tpot = 1\n")
    said: asyncio.Queue[bool] = asyncio.Queue()
    watching = asyncio.create_task(held.watch(said.put_nowait, every_s=0.005))
    await asyncio.sleep(0)
    for text, taken, w_tpot in (
        ("w_tpot = 6.5\n", True, 6.5),
        ("w_tpot = -1\n", False, 6.5),
        ("w_tpot = 22\n", True, 22.0),
    ):
        file.write_text(text)
        assert await asyncio.wait_for(said.get(), 20) is taken
        assert held.config.w_tpot == w_tpot
    watching.cancel()
