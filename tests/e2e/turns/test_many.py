"""Two hundred conversations at once: every answer right, every follow-up where its KV is, nothing left over."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from ppd.proxy.config import Mode

DATA = Path(__file__).parents[2] / "data" / "conversations"
COUNT = 200


def openers_and_follow_ups() -> list[list[dict[str, Any]]]:
    """What the users (and tools) of the sample conversations say, turn by turn."""
    found = []
    for file in sorted(DATA.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            said = [message for message in json.loads(line)["messages"] if message["role"] == "user"]
            if len(said) > 1:
                found.append(said[:4])
    return found


async def play(fleet: Any, user_turns: list[dict[str, Any]], tenant: int) -> list[tuple[str, str]]:
    """Route and text of each turn."""
    messages: list[dict[str, Any]] = []
    heard = []
    for said in user_turns:
        messages.append(said)
        turn = await fleet.chat(messages, headers={"Authorization": f"Bearer {tenant}"}, max_tokens=12)
        assert turn.status == 200
        heard.append((turn.route, turn.text))
        messages.append({"role": "assistant", "content": turn.text})
    return heard


async def test_200_concurrent_conversations_are_answered_as_one_engine_would(start_fleet: Any) -> None:
    samples = openers_and_follow_ups()
    assert len(samples) >= 10
    async with start_fleet("R1", mode=Mode.REPLICA) as alone:
        expected = [[text for _, text in await play(alone, sample, 0)] for sample in samples]
    async with start_fleet("P1 D1 D2", queue_wait_s=0.0) as fleet:  # a slow machine sheds none of them
        heard = await asyncio.gather(*(play(fleet, samples[n % len(samples)], n) for n in range(COUNT)))
        for n, turns in enumerate(heard):
            assert [text for _, text in turns] == expected[n % len(samples)]
            assert [route for route, _ in turns] == ["SPLIT"] + ["LOCAL"] * (len(turns) - 1)
        assert len(fleet.proxy.state.sessions) == COUNT
        await fleet.until(fleet.idle)
        for engine in fleet.engines.values():
            assert engine.received and not engine.counters.traps and not engine.counters.expired_handoffs
