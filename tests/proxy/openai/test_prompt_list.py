"""A list of prompts as requests of their own, and their answers as one."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.errors import BodyTooLarge, RequestError
from ppd.proxy.openai.prompt_list import AnswerMerge, BrokenAnswer, PromptList, StreamMerge, prompt_list
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.openai.sse import LIMIT_BYTES
from ppd.proxy.openai.units import LIST_LIMIT
from tests.support.requests import COMPLETIONS, parse, parse_bytes

MIB = 1024 * 1024
DONE = b"data: [DONE]\n\n"


def listed(prompt: Any, **members: Any) -> PromptList:
    found = prompt_list(parse(COMPLETIONS, prompt, **members), MIB)
    assert found is not None
    return found


# -- which requests are lists


@pytest.mark.parametrize(
    ("endpoint", "members"),
    [
        (COMPLETIONS, {"prompt": "a"}),
        (COMPLETIONS, {"prompt": ["a"]}),
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
        (COMPLETIONS, {"prompt": [[1, 2, 3]]}),
        (COMPLETIONS, {"prompt": ["a", "b"], "prompt_embeds": "AAAA"}),
    ],
)
def test_one_prompt_is_no_list(endpoint: Endpoint, members: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", **members}).encode()
    assert prompt_list(parse_bytes(body, endpoint), MIB) is None


@pytest.mark.parametrize(
    ("prompt", "bodies"),
    [
        (["a", "", "a"], [["a"], [""], ["a"]]),
        ([[1, 2], [3]], [[[1, 2]], [[3]]]),
    ],
)
def test_each_prompt_gets_all_else_that_was_asked_for(prompt: Any, bodies: list[Any]) -> None:
    others = {"model": "m", "stream": True, "n": 2, "stop": ["x"], "kv_transfer_params": {"a": 1.0}}
    found = listed(prompt, **others)
    assert found.choices == 2
    assert [json.loads(b"".join(found.parts(at))) for at in range(len(prompt))] == [
        {**others, "prompt": one} for one in bodies
    ]


def test_space_in_the_body_changes_nothing() -> None:
    request = parse_bytes(b'{"model":"m", "prompt" : [\n [1, 2] , [3]\n] }', COMPLETIONS)
    found = prompt_list(request, MIB)
    assert found is not None
    assert json.loads(b"".join(found.parts(1))) == {"model": "m", "prompt": [[3]]}


def test_one_prompt_of_a_list_is_the_session_that_it_is_alone() -> None:
    found = listed(["once upon a time " * 20, "b"])
    assert (
        parse_bytes(b"".join(found.parts(0)), COMPLETIONS).prompt.chain.keys
        == parse(COMPLETIONS, "once upon a time " * 20).prompt.chain.keys
    )


def test_a_list_has_a_longest_length() -> None:
    assert len(listed(["a"] * LIST_LIMIT).prompts) == LIST_LIMIT
    with pytest.raises(RequestError, match="at most 1024 prompts") as raised:
        listed(["a"] * (LIST_LIMIT + 1))
    assert (raised.value.status, raised.value.param) == (400, "prompt")


def test_what_prompts_share_counts_for_each_of_them() -> None:
    shared = "x" * (MIB // 10)
    listed(["a"] * 9, suffix=shared)
    with pytest.raises(BodyTooLarge):
        listed(["a"] * 11, suffix=shared)


# -- whole answers


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
    }


def answer(id: str, *choices: tuple[int, str], **members: Any) -> bytes:
    shown = [{"index": index, "text": text, "logprobs": None} for index, text in choices]
    return json.dumps({"id": id, "created": 7, "model": "m", "choices": shown, **members}).encode()


def merged(answers: dict[int, bytes], choices: int = 1, limit_bytes: int = MIB) -> Any:
    merge = AnswerMerge(choices, limit_bytes)
    for at, body in answers.items():
        merge.add(at, body)
    return json.loads(merge.whole())


def test_choices_are_numbered_and_ordered_by_prompt_whoever_answers_first() -> None:
    whole = merged(
        {
            1: answer("second", (1, "d"), (0, "c"), usage=usage(20, 2, 16), metrics={"ttft": 1}),
            0: answer("first", (0, "a"), (1, "b"), usage=usage(10, 5, 0), metrics={"ttft": 2}),
        },
        choices=2,
    )
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
        (3, "d"),
    ]
    assert (whole["id"], whole["created"], whole["model"]) == ("first", 7, "m")
    assert whole["usage"] == usage(30, 7, 16)
    assert "metrics" not in whole


@pytest.mark.parametrize(
    ("usages", "total"),
    [
        ((usage(1, 2), usage(3, 4)), usage(4, 6)),
        ((usage(1, 2), usage(3, 4, 5)), usage(4, 6, 5)),
        ((usage(1, 2), None), None),
    ],
)
def test_usage_is_a_sum_or_nothing(usages: tuple[Any, Any], total: Any) -> None:
    assert merged({at: answer("i", (0, "a"), usage=one) for at, one in enumerate(usages)})["usage"] == total


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"error":{"message":"m"}}',
        answer("i"),
        answer("i", (1, "b")),
        answer("i", (0, "a"), (1, "b"), (2, "c")),
        answer("i", (0, "a"), (0, "b")),
        answer("i", (1, "a"), (2, "b")),
        answer("i", (-1, "a"), (0, "b")),
        b'{"choices":[{"index":0},{"index":true}]}',
        b'{"choices":[{"index":0},{}]}',
    ],
)
def test_an_answer_without_its_choices_is_no_part_of_the_whole(body: bytes) -> None:
    with pytest.raises(BrokenAnswer) as raised:
        merged({0: answer("i", (0, "a"), (1, "b")), 1: body}, choices=2)
    assert raised.value.status == 502


def test_answers_are_bounded_as_a_whole() -> None:
    body = answer("i", (0, "x" * 1000))
    merged({0: body, 1: body}, limit_bytes=2 * len(body))
    with pytest.raises(BrokenAnswer, match="too long"):
        merged({0: body, 1: body}, limit_bytes=2 * len(body) - 1)


# -- streams


def event(id: str, *choices: tuple[int, str], **members: Any) -> bytes:
    return b"data: " + answer(id, *choices, **members) + b"\n\n"


def read(stream: bytes) -> list[Any]:
    """The events' data; comments as text."""
    data = [one.removeprefix(b"data: ") for one in stream.split(b"\n\n") if one]
    return [json.loads(one) if one.startswith(b"{") else one.decode() for one in data]


def test_events_come_as_they_come_under_one_name() -> None:
    merge = StreamMerge(count=2, choices=2)
    one, two = merge.part(0), merge.part(1)
    out = two.feed(event("b", (1, "d"))) + one.feed(event("a", (0, "a"), (1, "b"))) + two.feed(event("b", (0, "c")))
    events = read(out)
    assert [[(c["index"], c["text"]) for c in chunk["choices"]] for chunk in events] == [
        [(3, "d")],
        [(0, "a"), (1, "b")],
        [(2, "c")],
    ]
    assert {chunk["id"] for chunk in events} == {"b"}


def test_there_is_one_end() -> None:
    merge = StreamMerge(count=2, choices=1)
    parts = [merge.part(at) for at in range(2)]
    assert [part.feed(event("a", (0, "x")) + DONE)[-2:] for part in parts] == [b"\n\n"] * 2
    assert [part.feed(DONE + b": bye\n\n" + event("a", (0, "late"))) for part in parts] == [b"", b""]
    for part in parts:
        part.end()
    assert merge.end() == DONE


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r"])
def test_the_last_event_ends_as_those_before_it(end: bytes) -> None:
    part = StreamMerge(count=2, choices=1).part(0)
    shown = part.feed((event("a", (0, "x")) + DONE).replace(b"\n\n", end))
    part.end()
    assert shown.endswith(end) and b"[DONE]" not in shown


def test_usage_is_told_once_and_last() -> None:
    merge = StreamMerge(count=2, choices=1)
    for at, counts in enumerate((usage(10, 5, 0), usage(20, 2, 16))):
        part = merge.part(at)
        last = event("ab"[at], usage=counts, metrics={"ttft": 1})
        assert read(part.feed(event("ab"[at], (0, "x"), usage=None) + last + DONE))[0]["usage"] is None
    chunk, done = read(merge.end())
    assert (chunk["id"], chunk["choices"], chunk["usage"], done) == ("a", [], usage(30, 7, 16), "[DONE]")
    assert "metrics" not in chunk


def test_usage_that_one_prompt_lacks_is_not_told() -> None:
    merge = StreamMerge(count=2, choices=1)
    merge.part(0).feed(event("a", usage=usage(1, 1)) + DONE)
    merge.part(1).feed(event("a", (0, "x")) + DONE)
    assert merge.end() == DONE


def test_continuous_usage_stays_that_of_its_choice() -> None:
    chunk = event("a", (0, "x"), usage=usage(10, 1))
    (shown,) = read(StreamMerge(count=2, choices=1).part(1).feed(chunk))
    assert (shown["choices"][0]["index"], shown["usage"]) == (1, usage(10, 1))


def test_comments_go_through() -> None:
    assert StreamMerge(count=2, choices=1).part(1).feed(b": keep-alive\n\n") == b": keep-alive\n\n"


ERROR = b'data: {"error":{"message":"m","code":500}}\n\n'
OLD_ERROR = b'data: {"object":"error","message":"m","code":500}\n\n'


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (ERROR, ERROR),
        (OLD_ERROR, OLD_ERROR),
        (b"data: garbage\n\n", b""),
        (b"data: [1]\n\n", b""),
        (b'data: {"id":"a"}\n\n', b""),
        (event("a", (1, "another prompt's")), b""),
        (event("a", (0, "one"), (0, "or the other")), b""),
        (b'data: {"choices":[{"text":"whose?"}]}\n\n', b""),
        (b"data: " + b"x" * (LIMIT_BYTES + 1) + b"\n\n", b""),
    ],
    ids=["error", "old error", "garbage", "no object", "no choices", "index", "index twice", "no index", "too long"],
)
def test_what_is_no_piece_of_its_prompts_answer_breaks_the_whole(data: bytes, shown: bytes) -> None:
    with pytest.raises(BrokenAnswer) as raised:
        StreamMerge(count=2, choices=1).part(0).feed(data)
    assert raised.value.event == shown


@pytest.mark.parametrize("last", [b"", event("a", (0, "x")), event("a", (0, "x")) + DONE[:-1]])
def test_a_stream_that_stops_early_breaks_the_whole(last: bytes) -> None:
    part = StreamMerge(count=2, choices=1).part(0)
    part.feed(last)
    with pytest.raises(BrokenAnswer):
        part.end()


STREAM = event("a", (0, "Grüße")) + b": hm\r\n\r\n" + event("a", (0, "!")).replace(b"\n", b"\r\n") + DONE


@given(st.lists(st.integers(0, len(STREAM)), max_size=10))
def test_where_reads_end_makes_no_difference(cuts: list[int]) -> None:
    part = StreamMerge(count=2, choices=1).part(1)
    pieces = [STREAM[start:end] for start, end in pairwise([0, *sorted(cuts), len(STREAM)])]
    assert b"".join([part.feed(piece) for piece in pieces]) == StreamMerge(count=2, choices=1).part(1).feed(STREAM)
    part.end()
