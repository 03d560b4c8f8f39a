"""What the simulated proxy hears of caches: late, and no more than was said."""

from __future__ import annotations

import pytest

from ppd.offline.simulation.heard_cache import HeardCache
from ppd.offline.simulation.kv_cache import KvCache, Span
from ppd.offline.simulation.playback import Playback
from ppd.offline.simulation.routing import ProxySetup
from ppd.offline.simulation.setup import Setup
from ppd.offline.simulation.simulate import play
from ppd.offline.simulation.traced_prompts import traced_prompts
from ppd.offline.traces.turns import TracedConversation, TracedTurn
from ppd.proxy.config import Mode
from tests.support.decisions import rules
from tests.support.stepped_engine import profile_of

A, B = Span(1, 64), Span(2, 64)


@pytest.mark.parametrize(
    ("events", "most", "held"),
    [
        ([], 100, None),
        ([(1, 64)], 100, None),  # of what lies behind A no event has told
        ([(1, 64)], 60, 60),
        ([(1, 64), (2, 40)], 128, 104),
        ([(1, 64), (2, 64), (2, 16)], 128, 80),  # evicted from its end
        ([(1, 64), (2, 64), (1, 0)], 128, 0),
        ([(2, 64)], 128, 0),  # nothing without its beginning
    ],
)
def test_a_prompt_is_held_up_to_what_was_heard_last(events: list[tuple[int, int]], most: int, held: int | None) -> None:
    heard = HeardCache(lambda: 0.0, 0.0)
    for span, tokens in events:
        heard.happened(span, tokens)
    assert heard.held((A, B), most) == held


def test_events_are_heard_late() -> None:
    now_s = 0.0
    heard = HeardCache(lambda: now_s, 2.0)
    heard.happened(1, 64)
    assert heard.held((A,), 64) is None
    now_s = 2.0
    assert heard.held((A,), 64) == 64


def test_a_cache_tells_what_it_stores_and_evicts() -> None:
    told: list[tuple[int, int]] = []
    cache = KvCache(128, 16)
    cache.changed = lambda span, tokens: told.append((span, tokens))
    found, _, _ = cache.share((A, B))
    assert cache.reserve(128)
    assert cache.publish((A, B), found) == 128
    cache.release(found, 0)
    assert cache.reserve(100)
    assert told == [(1, 64), (2, 64), (2, 0), (1, 28)]


CHATS = (
    TracedTurn(new_tokens=800, output_tokens=50),
    *(TracedTurn(new_tokens=200, output_tokens=50, think_s=10.0) for _ in range(4)),
)


def local_and_misses(delay_s: float | None) -> tuple[int, int]:
    """LOCAL turns on caches that are too small, and those of them that found less than half of their history."""
    window = play(
        traced_prompts([TracedConversation(str(at), None, CHATS) for at in range(20)]),
        Playback(rate=1.0, sessions=30, later_turns=30, warm_up_s=20.0),
        "1P_2D",
        Setup(profile=profile_of(kv_capacity_tokens=20_000)),
        ProxySetup(rules=rules(Mode.ALWAYS_LOCAL), kv_events_delay_s=delay_s),
    )
    local = [one for one in window.played if one.record.route == "LOCAL"]
    return len(local), sum((one.record.cached_tokens or 0) < one.known_tokens / 2 for one in local)


def test_late_events_are_believed_and_prompt_ones_are_right() -> None:
    for delay_s in (None, 0.0):
        local, misses = local_and_misses(delay_s)
        assert local > misses == 0
    assert local_and_misses(30.0)[1] > 10
