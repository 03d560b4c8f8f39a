"""What the proxy believes of caches that are too small for the sessions, against caches that evict as vLLM's do."""

from __future__ import annotations

import pytest

from benchmarks.small.residency import agent, figures, play


@pytest.mark.parametrize(("capacity", "harmed"), [(800_000, 0.05), (1_500_000, 0.01)])
def test_agents_that_do_not_all_fit_are_seldom_sent_to_what_was_evicted(capacity: int, harmed: float) -> None:
    """Sixteen a D, whose prompts come to 115,000 tokens each."""
    records, claims = play([agent(number, 20, 0) for number in range(32)], "2P_2D", capacity)
    found = figures(records, claims)
    assert found["harmed"] <= harmed and found["local"] >= 0.7, found  # type: ignore[operator]
