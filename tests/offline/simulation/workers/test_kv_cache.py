"""The prefix cache in tokens: what is found, evicted and told of, and that nothing is lost count of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.offline.simulation.playback import Playback
from ppd.offline.simulation.routing import ProxySetup
from ppd.offline.simulation.setup import Setup
from ppd.offline.simulation.simulate import play
from ppd.offline.simulation.traced_prompts import traced_prompts
from ppd.offline.simulation.workers.kv_cache import HeardCache, KvCache, Span
from ppd.offline.traces.turns import TracedConversation, TracedTurn
from ppd.proxy.config import Mode
from tests.support.decisions import rules
from tests.support.stepped_engine import profile_of

A, B, C = Span(1, 64), Span(2, 64), Span(3, 64)


def cached(*prompts: tuple[Span, ...], capacity: int = 1000) -> KvCache:
    """A cache through which these prompts went, one after the other."""
    cache = KvCache(capacity, 16)
    for prompt in prompts:
        found, held, _ = cache.share(prompt)
        own = sum(span.tokens for span in prompt) - held
        assert cache.reserve(own)
        own -= cache.publish(prompt, found)
        cache.release(found, own)
    return cache


@pytest.mark.parametrize(
    ("before", "prompt", "hit"),
    [
        ([], (A,), 0),
        ([(A,)], (A, B), 64),
        ([(A,)], (B, A), 0),  # another prefix, although A's tokens are there
        ([(A, B)], (A, C), 64),
        ([(A, B)], (A, B), 112),  # one token is always computed, and hits are whole blocks
        ([(Span(1, 40),)], (A,), 32),  # a span that was longer when it was asked for again
    ],
)
def test_the_longest_cached_prefix_is_found_in_whole_blocks(
    before: list[tuple[Span, ...]], prompt: tuple[Span, ...], hit: int
) -> None:
    assert cached(*before).share(prompt)[2] == hit


def test_the_longest_unused_goes_first_and_of_one_prompt_its_tail() -> None:
    cache = cached((A, B), (C,), capacity=192)
    assert cache.reserve(64)
    assert cache.evicted_tokens == 64
    assert cache.share((A, B))[2] == 64
    assert cache.share((C, Span(9, 8)))[2] == 64


def test_what_is_in_use_is_never_evicted() -> None:
    cache = cached((A,), (B,), capacity=128)
    found, _, _ = cache.share((A, C))
    assert cache.reserve(64)  # takes B's place
    assert not cache.reserve(1)
    cache.release(found, 64)
    assert cache.used_tokens == 0
    assert cache.share((A, C))[2] == 64


def test_two_that_compute_one_prefix_at_once_leave_it_cached_once() -> None:
    cache = KvCache(1000, 16)
    first, second = cache.share((A,))[0], cache.share((A,))[0]
    assert cache.reserve(64)
    assert cache.reserve(64)
    assert cache.publish((A,), first) == 64
    assert cache.publish((A,), second) == 0
    cache.release(second, 64)
    assert cache.used_tokens == 64
    cache.release(first, 0)
    assert (cache.used_tokens, cache.available_tokens) == (0, 1000)


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), max_size=30), st.integers(100, 600))
def test_all_memory_is_available_again_when_all_have_ended(ids: list[list[int]], capacity: int) -> None:
    cache = KvCache(capacity, 16)
    for numbers in ids:
        chain = 0
        prompt = []
        for number in numbers:  # an id stands for all that is before it
            chain = chain * 10 + number
            prompt.append(Span(chain, 16 * number + 3))
        found, held, _ = cache.share(prompt)
        own = sum(span.tokens for span in prompt) - held
        if cache.reserve(own):
            own -= cache.publish(prompt, found)
            assert cache.used_tokens <= capacity
        else:
            own = 0
        cache.release(found, own)
        assert cache.used_tokens == 0


# -- what the proxy hears of it


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
