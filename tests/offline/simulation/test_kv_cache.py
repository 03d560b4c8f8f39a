"""The prefix cache in tokens: what is found, what is evicted, and that nothing is lost count of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.offline.simulation.kv_cache import KvCache, Span

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
