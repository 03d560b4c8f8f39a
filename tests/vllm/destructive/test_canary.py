"""The data path's canary over a pair of real engines."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.proxy.fleet.worker import Role

pytestmark = pytest.mark.asyncio(loop_scope="session")

PULLED = "external_kv_transfer"
PAIR = (Role.PREFILL, Role.DECODE)


async def test_canaries_cross_a_sound_pair_and_leave_nothing(fleet: Any) -> None:
    before = await fleet.counters(Role.DECODE)
    said_before = {role: len(log_lines(fleet, role)) for role in PAIR}
    async with fleet.beside(canary_interval_s=0.5) as beside:

        async def flown() -> bool:
            return bool(await beside.metric('ppd_canaries_total{result="ok"}') >= 3)

        await fleet.eventually(flown)
        assert await results(beside) == {"ok"}
    assert (await fleet.counters(Role.DECODE))[PULLED] > before.get(PULLED, 0.0)

    async def is_idle() -> bool:
        loads = [await fleet.load(role) for role in PAIR]
        return not any(load.running or load.waiting or load.kv_usage for load in loads)

    await fleet.eventually(is_idle, limit_s=30)
    for role in PAIR:
        said = log_lines(fleet, role)[said_before[role] :]
        assert not [line for line in said if is_of_a_canary(line) and (" ERROR " in line or "Traceback" in line)]


def is_of_a_canary(line: str) -> bool:
    """Canaries ask for completions. What an engine says of a chat is late news of a turn before."""
    return "chatcmpl-" not in line


def log_lines(fleet: Any, role: Role) -> list[str]:
    text: str = fleet.engines[role].log_path.read_text(errors="replace")
    return text.splitlines()


async def results(beside: Any) -> set[str]:
    """How canaries have gone so far."""
    async with beside.session.get(f"{beside.base_url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return {line.split('result="')[1].split('"')[0] for line in lines if line.startswith("ppd_canaries_total{")}
