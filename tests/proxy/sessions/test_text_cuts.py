"""Keys inside of long texts: where they lie, and what they name."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from ppd.proxy.openai.request import Endpoint
from ppd.proxy.sessions.prefix_chain import UNIT_OVERHEAD_BYTES
from ppd.proxy.sessions.text_cuts import cuts_of, grown_offsets, kept_blocks
from tests.support.requests import COMPLETIONS, MESSAGES, RESPONSES, assistant, parse, text, user

LONG = "".join(f"{number:7} " for number in range(4000))  # 32,000 bytes


def cuts(*messages: Any, endpoint: Endpoint = Endpoint.CHAT) -> list[tuple[int, int]]:
    return list(cuts_of(parse(endpoint, list(messages)).prompt.chain))


def test_a_text_is_cut_at_4_kib_and_wherever_it_has_grown_by_an_eighth() -> None:
    ends = [end - UNIT_OVERHEAD_BYTES for _, end in cuts(user(LONG))]
    assert ends == [kib * 1024 for kib in (4, 5, 6, 7, 8, 9, 11, 13, 15, 17, 20, 23, 26, 30)]
    assert all(later - earlier <= max(1024, earlier / 8 + 1024) for earlier, later in pairwise(ends))


@pytest.mark.parametrize(("size", "count"), [(4096, 0), (4097, 1), (5120, 1), (5121, 2)])
def test_nothing_is_cut_at_a_texts_own_end(size: int, count: int) -> None:
    assert len(cuts(user("x" * size))) == count


@pytest.mark.parametrize("kept", [4096, 5000, 5120, 20_000, 31_999])
def test_a_cut_names_all_before_it_and_nothing_after_it(kept: int) -> None:
    whole, other = cuts(user("a"), user(LONG)), cuts(user("a"), user(LONG[:kept] + "other " + LONG[kept:]))
    common = {key for key, _ in whole} & {key for key, _ in other}
    before = UNIT_OVERHEAD_BYTES * 2 + 1
    assert [end for key, end in whole if key in common] == [end for _, end in whole if end - before <= kept]
    assert common.isdisjoint(key for key, _ in cuts(user("b"), user(LONG)))


def test_cuts_are_the_same_however_the_text_is_written() -> None:
    assert (
        cuts(user(LONG)) == cuts(user([text(LONG)])) == cuts(user([text(LONG), text("more")]))[: len(cuts(user(LONG)))]
    )
    assert cuts(user(LONG)) != cuts(assistant(LONG))
    apart = cuts(user([text("first"), text(LONG)]))
    assert {key for key, _ in apart}.isdisjoint(key for key, _ in cuts(user(LONG)))


@pytest.mark.parametrize("endpoint", [RESPONSES, MESSAGES])
def test_each_endpoint_of_messages_has_cuts(endpoint: Endpoint) -> None:
    assert len(cuts(user([text(LONG)]), endpoint=endpoint)) == 14


def test_only_the_first_long_text_and_the_newest_are_cut() -> None:
    chain = parse(prompt=[user(LONG + str(number)) for number in range(20)]).prompt.chain
    cut_units = {sum(end > start for start in chain.ends) for _, end in cuts_of(chain)}
    assert len(cut_units) == 5
    assert len(cuts_of(chain)) == 5 * 14


def test_cuts_that_were_made_outlive_the_prompt() -> None:
    chain = parse(prompt=[user(LONG)]).prompt.chain
    assert cuts_of(chain.without_prompt()) == ()  # they were not asked for in time
    made = cuts_of(chain)
    assert cuts_of(chain.without_prompt()) == made


def test_blocks_of_a_raw_prompt_are_remembered_by_their_offsets_alone() -> None:
    def remembered(prompt: str) -> list[tuple[int, int]]:
        chain = parse(COMPLETIONS, prompt).prompt.chain
        return [(chain.keys[place], chain.ends[place]) for place in kept_blocks(chain.ends)]

    shorter, longer = remembered(LONG[:9000]), remembered(LONG)
    assert longer[: len(shorter)] == shorter
    assert 0 not in [end for _, end in longer]
    assert len(longer) < 50


def test_offsets_grow_by_an_eighth() -> None:
    offsets = grown_offsets(4096, 1024, 1 << 32)
    assert len(offsets) < 130
    assert all(1.12 < later / earlier < 1.26 for earlier, later in pairwise(offsets))
