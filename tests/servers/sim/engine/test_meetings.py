"""What P says of prompts that wait for their D."""

from __future__ import annotations

from ppd.servers.sim.core.counters import Counters
from ppd.servers.sim.core.handoffs import HandedOver
from ppd.servers.sim.engine.meetings import Meetings
from ppd.servers.sim.protocols import PROTOCOLS


async def test_a_prompt_whose_lease_is_over_waits_for_nobody() -> None:
    """Else a P that nobody asks of anything else would look busy for good."""
    pinned = {"a", "b"}
    meetings = Meetings(PROTOCOLS["sglang"], Counters(), 1.0, pinned.__contains__)
    for request_id in ("a", "b"):
        meetings.hand_over(f"room of {request_id}", HandedOver(request_id, (0,), 1, 0))
    assert len(meetings) == 2
    pinned.remove("a")
    assert len(meetings) == 1
    meetings.take("b")
    assert len(meetings) == 0
