"""The index of what was sent to each server: what is matched, and what is forgotten first."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.policy.profiles.prefix_index import PrefixIndex
from ppd.proxy.policy.profiles.prompt_blocks import BlockRule, PromptBlocks, blocks_of
from tests.support.decisions import D1, D2, view

RULE = BlockRule(block_tokens=4, most_blocks=256)  # 16 bytes


def prompt(*units: tuple[str, int], rule: BlockRule = RULE) -> PromptBlocks:
    """units: each by its content and its bytes."""
    keys, ends, chained = [0], [0], ""
    for text, size in units:
        chained += f"/{text}"
        keys.append(hash(chained) & (2**64 - 1))
        ends.append(ends[-1] + size)
    return blocks_of(keys, ends, ends[-1], rule)


def matched(index: PrefixIndex, one: PromptBlocks, at: WorkerView = D1) -> int:
    return index.matched(one, (at,))[0]


def test_what_two_prompts_begin_with_is_matched_in_whole_units() -> None:
    index = PrefixIndex(1000)
    index.sent(prompt(("system", 160), ("hi", 80), ("well", 96)), D1)
    assert matched(index, prompt(("system", 160), ("hi", 80), ("well", 96), ("more", 400)), D1) == 21
    assert matched(index, prompt(("system", 160), ("hi", 80), ("well", 90)), D1) == 20, "as much as it has itself"
    assert matched(index, prompt(("system", 160), ("ho", 80)), D1) == 10
    assert matched(index, prompt(("other", 160), ("hi", 80)), D1) == 0
    assert matched(index, prompt(("system", 160)), D2) == 0


def test_an_earlier_prompt_is_matched_wherever_it_ended() -> None:
    """Names that longer prompts do not keep are looked for too."""
    index, units = PrefixIndex(1000), [(str(number), 16) for number in range(20)]
    for count in range(1, 20):
        index.sent(prompt(*units[:count]), D1)
        assert matched(index, prompt(*units), D1) == count


def test_no_more_of_a_prompt_is_looked_at_than_the_rule_says() -> None:
    index, few = PrefixIndex(1000), BlockRule(4, 5)
    long = prompt(("a", 64), ("b", 640), rule=few)
    assert long.count == 5
    index.sent(long, D1)
    assert matched(index, prompt(("a", 64), ("b", 640), ("c", 640), rule=few), D1) == 5


def test_the_least_recently_used_are_forgotten_first() -> None:
    index = PrefixIndex(100)
    prompts = [prompt((str(number), 16 * 20)) for number in range(8)]
    for one in prompts:
        index.sent(one, D1)
        index.sent(prompts[0], D1)
    held = [matched(index, one, D1) for one in prompts]
    assert sum(held) <= 100
    assert held[0] == held[7] == 20, "what is used stays, and what is new"
    assert held[1] == 0


def test_another_engine_at_the_address_has_nothing() -> None:
    index, one = PrefixIndex(100), prompt(("a", 160))
    index.sent(one, D1)
    assert matched(index, one, D1) == 10
    assert matched(index, one, view("D", 1, incarnation="another")) == 0


UNITS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 200)), max_size=12)


Units = list[tuple[str, int]]


@given(st.lists(UNITS, max_size=12), UNITS)
def test_no_more_is_matched_than_was_sent_and_no_more_is_held_than_fits(sent: list[Units], asked: Units) -> None:
    """Also with units that end inside of a block, or are empty."""
    index, capacity = PrefixIndex(64), 64
    units = [(f"{text}{size}", size) for text, size in asked]
    most = 0
    for one in sent:
        other = [(f"{text}{size}", size) for text, size in one]
        common = 0
        for mine, theirs in zip(units, other, strict=False):
            if mine != theirs:
                break
            common += mine[1]
        most = max(most, common // RULE.block_bytes)
        if other:
            index.sent(prompt(*other), D1)
    most_matched = matched(index, prompt(*units), D1) if units else 0
    assert most_matched <= min(most, capacity)


@pytest.mark.slow
def test_a_server_of_the_smallest_units_takes_a_megabyte() -> None:
    """31,250 blocks, where each message is one, and each turn adds one."""
    rule, chance = BlockRule(5, 256), random.Random(1)
    index, most = PrefixIndex(31_250), 0
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(250):
        keys = [chance.getrandbits(64) for _ in range(65)]
        for turns in range(1, 65):
            ends = range(0, 20 * turns + 1, 20)
            index.sent(blocks_of(keys[: len(ends)], ends, ends[-1], rule), D1)
        most = max(most, tracemalloc.get_traced_memory()[0] - before)
    tracemalloc.stop()
    assert most < 1_000_000
