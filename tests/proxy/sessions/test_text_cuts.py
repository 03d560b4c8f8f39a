"""Keys inside of long texts: where they lie, and what they name."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from ppd.proxy.openai.request import Endpoint
from ppd.proxy.sessions.hasher import LONG_BYTES
from ppd.proxy.sessions.prefix_chain import UNIT_OVERHEAD_BYTES
from ppd.proxy.sessions.text_cuts import cuts_of, grown_offsets, kept_blocks
from tests.support.requests import COMPLETIONS, MESSAGES, RESPONSES, assistant, parse, text, user

LONG = "".join(f"{number:7} " for number in range(4000))  # 32,000 bytes


def cuts(*messages: Any, endpoint: Endpoint = Endpoint.CHAT, **members: Any) -> list[tuple[int, int]]:
    return list(cuts_of(parse(endpoint, list(messages), **members).prompt.chain))


def long_cuts(*messages: Any, endpoint: Endpoint = Endpoint.CHAT) -> list[tuple[int, int]]:
    chain = parse(endpoint, list(messages)).prompt.chain
    start = chain.ends[-2] + UNIT_OVERHEAD_BYTES + LONG_BYTES
    return [cut for cut in cuts_of(chain) if cut[1] >= start or cut[1] <= chain.ends[-2]]


def test_a_text_is_cut_at_4_kib_and_wherever_it_has_grown_by_an_eighth() -> None:
    ends = [end - UNIT_OVERHEAD_BYTES for _, end in long_cuts(user(LONG))]
    assert ends == [kib * 1024 for kib in (4, 5, 6, 7, 8, 9, 11, 13, 15, 17, 20, 23, 26, 30)]
    assert all(later - earlier <= max(1024, earlier / 8 + 1024) for earlier, later in pairwise(ends))


@pytest.mark.parametrize(("size", "count"), [(4096, 0), (4097, 1), (5120, 1), (5121, 2)])
def test_nothing_is_cut_at_a_texts_own_end(size: int, count: int) -> None:
    assert len(long_cuts(user("x" * size))) == count


@pytest.mark.parametrize("kept", [4096, 5000, 5120, 20_000, 31_999])
def test_a_cut_names_all_before_it_and_nothing_after_it(kept: int) -> None:
    whole, other = cuts(user("a"), user(LONG)), cuts(user("a"), user(LONG[:kept] + "other " + LONG[kept:]))
    common = {key for key, _ in whole} & {key for key, _ in other}
    before = UNIT_OVERHEAD_BYTES * 2 + 1
    assert [end for key, end in whole if key in common] == [end for _, end in whole if end - before <= kept]
    assert common.isdisjoint(key for key, _ in cuts(user("b"), user(LONG)))


@pytest.mark.parametrize("kept", [4096, 5120, 256])
def test_a_text_that_ends_where_another_is_cut_has_another_key(kept: int) -> None:
    shorter = parse(Endpoint.CHAT, [user(LONG[:kept])]).prompt.chain
    assert shorter.ends[-1] in [end for _, end in cuts(user(LONG))]
    assert shorter.keys[-1] not in [key for key, _ in cuts(user(LONG))]


def test_cuts_are_the_same_however_the_text_is_written() -> None:
    assert (
        cuts(user(LONG)) == cuts(user([text(LONG)])) == cuts(user([text(LONG), text("more")]))[: len(cuts(user(LONG)))]
    )
    assert cuts(user(LONG)) != cuts(assistant(LONG))
    apart = cuts(user([text("first"), text(LONG)]))
    assert {key for key, _ in apart}.isdisjoint(key for key, _ in cuts(user(LONG)))


@pytest.mark.parametrize("endpoint", [RESPONSES, MESSAGES])
def test_each_endpoint_of_messages_has_cuts(endpoint: Endpoint) -> None:
    assert len(long_cuts(user([text(LONG)]), endpoint=endpoint)) == 14


def test_the_newest_message_and_the_one_before_the_newest_reply_are_cut_finer() -> None:
    sent = [user("a" * 600), assistant("b" * 600), user("c" * 600), assistant("d" * 600), user("e" * 600)]
    chain = parse(prompt=sent).prompt.chain
    starts = [chain.ends[at] + UNIT_OVERHEAD_BYTES for at in (2, 4)]
    assert [end for _, end in cuts_of(chain)] == [start + offset for start in starts for offset in (256, 512)]


@pytest.mark.parametrize("size", [256, 257, 700, 4096, 5000, 1_000_000])
def test_fine_cuts_lie_inside_of_a_text_and_name_its_start(size: int) -> None:
    one, other = cuts(user("x" * size)), cuts(user("x" * (size // 2) + "y" * size))
    common = {key for key, _ in one} & {key for key, _ in other}
    within = [end for _, end in one if end - UNIT_OVERHEAD_BYTES <= size // 2]
    assert [end for key, end in one if key in common] == within
    assert len(one) == len({key for key, _ in one}) <= 70, "also where all characters are equal"
    assert all(end < UNIT_OVERHEAD_BYTES + size for _, end in one)


HEAD = "".join(f"{number:7} " for number in range(1000))  # 8,000 bytes


def clock(minute: str) -> dict[str, Any]:
    return {"role": "system", "content": f"{HEAD}It is {minute} now."}


@pytest.mark.parametrize("minute", ["12:00", "9:59", "seven minutes past twelve"])
def test_heads_that_part_near_their_end_have_nearly_all_in_common(minute: str) -> None:
    one, other = cuts(clock("12:01"), user("a")), cuts(clock(minute), user("b"))
    shared = max(end for key, end in one if key in {key for key, _ in other})
    assert len(HEAD) - 128 - UNIT_OVERHEAD_BYTES < shared - UNIT_OVERHEAD_BYTES <= len(HEAD) + len("It is 12:0")


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [{"role": "developer", "content": HEAD}]},
        {"messages": [{"role": "system", "content": "x" + HEAD}]},
        {"messages": [{"role": "system", "content": HEAD}], "cache_salt": "s"},
        {"messages": [{"role": "system", "content": HEAD}], "model": "n"},
        {"messages": [user(HEAD)]},
    ],
)
def test_another_role_start_salt_or_model_has_no_point_in_common(other: dict[str, Any]) -> None:
    mine = {key for key, _ in cuts({"role": "system", "content": HEAD}, user("a"))}
    theirs = cuts_of(parse(prompt=[*other.pop("messages"), user("a")], **other).prompt.chain)
    assert mine and theirs and mine.isdisjoint(key for key, _ in theirs)


def test_points_of_a_head_are_the_same_however_it_is_written() -> None:
    messages = [user("a")]
    assert cuts(clock("1"), *messages, endpoint=MESSAGES) != []
    parts = cuts(*messages, endpoint=MESSAGES, system=[text(HEAD)])
    assert cuts(*messages, endpoint=MESSAGES, system=HEAD) == parts
    assert cuts(*messages, endpoint=RESPONSES, instructions=HEAD) != []


def test_of_many_tools_some_ends_are_points() -> None:
    tools = [{"type": "function", "function": {"name": f"tool_{n}", "description": "d" * 50}} for n in range(500)]
    found = cuts(user("a"), tools=tools)
    assert len(found) == 64
    longest = cuts(user("a"), tools=tools[:400])[-1]
    assert max(end for key, end in cuts(user("a"), tools=tools[:400]) if (key, end) in found) >= longest[1] * 0.8


def test_only_the_first_long_text_and_the_newest_are_cut() -> None:
    chain = parse(prompt=[user(LONG + str(number)) for number in range(20)]).prompt.chain
    cut_units = {sum(end > start for start in chain.ends) for _, end in cuts_of(chain)}
    assert len(cut_units) == 5
    assert len(cuts_of(chain)) == 5 * 14 + 12, "and fine ones of the newest"


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
