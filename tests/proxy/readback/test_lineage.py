"""Which tokens a handle stands for, by what D's answer says of itself."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ppd.proxy.kv_events.block_tokens import packed
from ppd.proxy.readback.lineage import LATEST, HandleReader, Lineage, ToldHandle, digest_of

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
PROMPT, ANSWER = list(range(100, 160)), [7, 8, 9]
KNOWN = len(PROMPT) + len(ANSWER) - 1


def params(count: Any = KNOWN) -> dict[str, Any]:
    return {"do_remote_decode": True, "remote_num_tokens": count}


@example([PROMPT], LATEST)
@example([PROMPT], LATEST + 1)
@given(st.lists(tokens, max_size=6), st.integers(0, LATEST + 2))
def test_a_digest_is_that_of_the_first_tokens_however_they_came(parts: list[list[int]], left_out: int) -> None:
    lineage, whole = Lineage(), list(itertools.chain(*parts))
    for part in parts:
        lineage.add(part)
    count = len(whole) - left_out
    known = count > 0 and left_out <= LATEST
    assert lineage.count == len(whole)
    assert lineage.digest(count) == (digest_of(packed(whole[:count])) if known else None)
    assert lineage.digest(len(whole) + 1) is None


def chunk(*choices: dict[str, Any], **members: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, **choice} for choice in choices], **members}


def told(*events: dict[str, Any]) -> ToldHandle | None:
    reader = HandleReader()
    for event in events:
        reader.read(msgspec.json.encode(event))
    return reader.told


RIGHT = digest_of(packed([*PROMPT, *ANSWER[:-1]]))
LAST = chunk({"token_ids": ANSWER[2:], "finish_reason": "stop"}, kv_transfer_params=params())


@pytest.mark.parametrize(
    "events",
    [
        [chunk({"token_ids": ANSWER}, prompt_token_ids=PROMPT, kv_transfer_params=params())],
        [chunk({"token_ids": ANSWER, "prompt_token_ids": PROMPT}, kv_transfer_params=params())],
        [
            chunk(
                {"token_ids": ANSWER, "prompt_token_ids": PROMPT}, prompt_token_ids=PROMPT, kv_transfer_params=params()
            )
        ],
        [chunk({}, prompt_token_ids=PROMPT), chunk({"token_ids": ANSWER[:2]}), LAST, chunk(usage={})],
        [{"choices": None}, chunk({"token_ids": ANSWER[:2]}, prompt_token_ids=PROMPT), LAST],
        [chunk({"prompt_token_ids": PROMPT, "token_ids": ANSWER[:1]}), chunk({"token_ids": ANSWER[1:2]}), LAST],
        [chunk({}, prompt_token_ids=PROMPT), chunk({"token_ids": None}), chunk({"token_ids": ANSWER[:2]}), LAST],
    ],
)
def test_a_handle_stands_for_the_prompt_and_the_answer_but_its_last_token(events: list[dict[str, Any]]) -> None:
    found = told(*events)
    assert found is not None
    assert (found.tokens, found.digest) == (len(PROMPT) + 2, RIGHT)
    assert msgspec.json.decode(found.params) == params()


@pytest.mark.parametrize(
    "events",
    [
        [chunk({"token_ids": ANSWER}, prompt_token_ids=PROMPT)],  # D keeps nothing
        [chunk({"token_ids": ANSWER}, prompt_token_ids=PROMPT, kv_transfer_params=None)],
        [chunk({"token_ids": ANSWER}, kv_transfer_params=params())],  # the prompt is not told
        [chunk({}, prompt_token_ids=PROMPT, kv_transfer_params=params())],  # nor here the answer
        [chunk({"token_ids": [-1]}, prompt_token_ids=PROMPT), LAST],
        [chunk({"token_ids": ["7"]}, prompt_token_ids=PROMPT), LAST],
        [chunk({"token_ids": ANSWER[:2]}, {"index": 1, "token_ids": [1]}, prompt_token_ids=PROMPT), LAST],
        *(
            [chunk({"token_ids": ANSWER}, prompt_token_ids=PROMPT, kv_transfer_params=params(count))]
            for count in (None, "62", -1, 0, 64, 2**70)
        ),
        [chunk({"token_ids": ANSWER}, prompt_token_ids=PROMPT, kv_transfer_params=[1])],
    ],
)
def test_what_is_not_told_whole_is_no_handle(events: list[dict[str, Any]]) -> None:
    assert told(*events) is None


def test_what_is_no_json_ends_the_reading() -> None:
    reader = HandleReader()
    reader.read(b"{")
    reader.read(msgspec.json.encode(chunk({"token_ids": ANSWER}, prompt_token_ids=PROMPT, kv_transfer_params=params())))
    assert reader.told is None
