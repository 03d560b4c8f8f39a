"""Files that change under several processes: the supervisor reads them for successors."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.proxy.peers.test_supervisor import supervised

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("how", ["well", "ill"])
def test_changed_files_are_read_for_successors_before_they_begin(tmp_path: Path, how: str) -> None:
    """However that goes: the supervisor outlives what a file holds."""
    work = f"""
module.WATCH_EVERY_S = module.pulse.LOOK_S = 0.02
held = []
def reread():
    held.append("")
    if {how == "ill"} and len(held) % 2:
        raise ValueError("as ordered")

def work(member, alive):
    say("holds", len(held))
    return wait(alive)
"""
    with supervised(tmp_path, work) as one:
        one.ready()
        for _ in range(2):
            os.kill(one.pids("ready")[-1], signal.SIGKILL)
            one.ready(1 + len(one.pids("ready")))
        *_, earlier, latest = one.pids("holds")
        assert latest > earlier > 0
        one.process.terminate()
        assert one.ends() == 0
        assert ("as ordered" in (tmp_path / "err").read_text()) is (how == "ill")
