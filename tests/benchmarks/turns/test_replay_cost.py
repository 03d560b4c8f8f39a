"""The log whose replay is timed."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.turns.replay_cost import DECODES, main, receipts
from tests.offline.replay.receipts import log_of

pytestmark = pytest.mark.slow


def test_its_sessions_pause_and_come_back_to_their_worker() -> None:
    made = list(receipts(4000))
    assert [one.at for one in made] == sorted(one.at for one in made)
    log = log_of(*made)
    assert (len(log.turns), log.undecided, log.repeated, log.damage.count) == (4000, 0, 0, 0)
    sessions = {one.session for one in made}
    assert 3.0 < len(made) / len(sessions) < 4.5
    assert len({(one.session, one.decode) for one in made}) == len(sessions)
    assert {one.decode for one in made} == {f"D{number + 1}" for number in range(DECODES)}
    assert [one.id for one in made] == [one.id for one in receipts(4000)], "the same each time"


def test_a_log_is_written_and_replayed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    result = CliRunner().invoke(main, ["--receipts", "30", "--log", str(log)])
    assert result.exit_code == 0, result.output
    assert "30 receipts, 0.00 GB" in result.output
    assert "GB of memory at most" in result.output
    assert "30 turns of" in capfd.readouterr().out
