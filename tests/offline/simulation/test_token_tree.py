"""The tree of prompts, and the prefix cache over its spans, against prompts taken token by token."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ppd.offline.simulation.token_tree import TokenRange, TokenTree, beyond, cut_at, in_common, joined
from ppd.offline.simulation.workers.kv_cache import KvCache, Span, with_answer

Tokens = tuple[int, ...]

# Prompts over a small alphabet begin alike often. No prompt is the start of another: the last token is its own.
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=8), min_size=1, max_size=25).map(
    lambda prompts: [(*(token * 100 for token in prompt), 1000 + at) for at, prompt in enumerate(prompts)]
)


def ranges(prompt: Sequence[int]) -> list[TokenRange]:
    found: list[TokenRange] = []
    for token in prompt:
        found = joined(found, [TokenRange(token, 1)])
    return found


def alike(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def tree_of(prompts: Sequence[Tokens]) -> TokenTree:
    tree = TokenTree()
    for prompt in prompts:
        tree.add(ranges(prompt), (len(prompt) // 2, len(prompt)))
    return tree


@given(PROMPTS)
def test_prompts_have_the_spans_in_common_that_their_tokens_are(prompts: list[Tokens]) -> None:
    tree = tree_of(prompts)
    made = [tree.spans(ranges(prompt)) for prompt in prompts]
    for prompt, (spans, units) in zip(prompts, made, strict=True):
        assert sum(span.tokens for span in spans) == sum(unit.tokens for unit in units) == len(prompt)
        for other, (theirs, their_units) in zip(prompts, made, strict=True):
            same = alike(prompt, other)
            assert in_common(ranges(prompt), ranges(other)) == same
            assert sum(span.tokens for span in set(spans) & set(theirs)) == same
            assert sum(unit.tokens for unit in set(units) & set(their_units)) == same


@given(PROMPTS, st.integers(0, 9))
def test_a_prompt_cut_in_two_is_the_whole(prompts: list[Tokens], at: int) -> None:
    for prompt in map(ranges, prompts):
        assert joined(cut_at(prompt, at), beyond(prompt, at)) == prompt


def test_units_end_where_prompts_and_answers_do() -> None:
    """The tree joins prompts that only grow into one edge: one span for the cache, a unit for each message."""
    tree = TokenTree()
    whole = [TokenRange(0, 1000)]
    for tokens, answered in ((300, 350), (500, 600)):
        tree.add(cut_at(whole, answered), (tokens, answered))
    spans, units = tree.spans(cut_at(whole, 500))
    assert spans == (Span(spans[0].id, 500),)
    assert [unit.tokens for unit in units] == [300, 50, 150]
    assert tree.spans(cut_at(whole, 300))[1] == units[:1]


class BlockLru:
    """vLLM's prefix cache with blocks of one token: the least recently used go first, of a prompt the last ones."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: dict[Tokens, None] = {}  # by the prompt up to them; the first is evicted next

    def use(self, prompt: Tokens) -> int:
        prefixes = [prompt[: at + 1] for at in range(len(prompt))]
        hit = next((at for at, prefix in enumerate(prefixes) if prefix not in self._blocks), len(prompt))
        for prefix in prefixes[:hit]:
            del self._blocks[prefix]
        while len(self._blocks) + len(prompt) > self._capacity:
            del self._blocks[next(iter(self._blocks))]
        self._blocks |= dict.fromkeys(reversed(prefixes))
        return min(hit, len(prompt) - 1)


@given(PROMPTS, st.lists(st.integers(0, 24), max_size=60), st.integers(9, 40))
def test_the_cache_keeps_of_shared_prompts_what_blocks_would(
    prompts: list[Tokens], used: list[int], capacity: int
) -> None:
    tree, blocks, cache = tree_of(prompts), BlockLru(capacity), KvCache(capacity, 1)
    for number in used:
        prompt = prompts[number % len(prompts)]
        spans, _ = tree.spans(ranges(prompt))
        found, held, hit = cache.share(spans)
        assert hit == blocks.use(prompt)
        own = len(prompt) - held
        assert cache.reserve(own)
        own -= cache.publish(spans, found)
        cache.release(found, own)


def test_an_answer_goes_on_in_the_span_where_its_prompt_ended() -> None:
    prompt, reply = (Span(1, 10), Span(2, 30)), (Span(2, 5), Span(3, 20))
    assert with_answer(prompt, reply, 4) == (Span(1, 10), Span(2, 34))
    assert with_answer(prompt, reply, 24) == (Span(1, 10), Span(2, 35), Span(3, 19))
    assert with_answer(prompt, (), 0) == prompt
