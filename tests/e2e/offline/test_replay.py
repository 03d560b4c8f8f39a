"""A log of a real fleet, replayed by the rules that it was made with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ppd.offline.cli.replay import replayed
from ppd.proxy.config import Mode, ProxyConfig

pytestmark = pytest.mark.e2e
PROFILE = "h100-llama-3.1-8b"


@pytest.mark.parametrize("mode", [Mode.ALWAYS_LOCAL, Mode.SLO])
async def test_the_rules_that_made_a_log_decide_nearly_all_of_it_alike(
    start_fleet: Any, tmp_path: Path, mode: Mode
) -> None:
    log = tmp_path / "receipts.jsonl"
    settings = {"mode": mode, "profile": PROFILE, "receipt_log": str(log), "engine": {"time_scale": 0.1}}
    async with start_fleet("P1 D1 D2", **settings) as fleet:

        async def converse(number: int) -> None:
            chat = fleet.conversation()
            for text in (f"{number} and a message of some length. " * 60, "and on", "and on"):
                await chat.say(text)

        await asyncio.gather(*map(converse, range(12)))
    found = replayed(log, ProxyConfig(mode=mode, profile=PROFILE), None)
    assert (found.turns, found.sessions, found.undecided, found.refused, found.damaged) == (36, 12, 0, 0, 0)
    assert all(before == after for before, after, _ in found.changes), found.changes
    assert found.changed <= 12, "equal workers, of which others are chosen"
