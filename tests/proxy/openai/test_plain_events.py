"""Events recognised without decoding: what they say is what decoding them says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.openai.answer import AnswerObserver
from ppd.proxy.openai.edits import Edits
from ppd.proxy.openai.plain_events import ATTEMPTS, PlainEvents
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.openai.stream_relay import StreamRelay

CHAT, COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS
ROLE = {"role": "assistant", "content": ""}


def chunk(delta: dict[str, Any], **rest: Any) -> dict[str, Any]:
    finish = rest.pop("finish_reason", None)
    choice = {"index": rest.pop("index", 0), "delta": delta, "logprobs": None, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **rest}


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


LEARNT = event(chunk({"content": "a text"}))


def pattern() -> PlainEvents:
    plain = PlainEvents(CHAT)
    plain.learn(LEARNT)
    assert plain.pattern is not None and not plain.is_learning
    return plain


@pytest.mark.parametrize("text", ["", " ", "x", "déjà vu", "日本", "{}", "data: [DONE]", "usage", "\x7f", "a" * 9999])
def test_another_text_in_the_same_event(text: str) -> None:
    assert pattern().text(event(chunk({"content": text}))) == text


OTHERS = {
    "a quotation mark": event(chunk({"content": 'say "no"'})),
    "a backslash": event(chunk({"content": "a\\b"})),
    "an escaped line end": event(chunk({"content": "a\nb"})),
    "a raw line end": LEARNT.replace(b"a text", b"a\ntext"),
    "no UTF-8": LEARNT.replace(b"a text", b"\xff"),
    "the end": event(chunk({"content": "a text"}, finish_reason="stop")),
    "a role": event(chunk({**ROLE, "content": "a text"})),
    "another choice": event(chunk({"content": "a text"}, index=1)),
    "usage": event(chunk({"content": "a text"}, usage={"prompt_tokens": 1})),
    "another id": LEARNT.replace(b'"c"', b'"d"'),
    "two events": LEARNT + LEARNT,
    "half of one": LEARNT[:-1],
    "its two ends, overlapping": LEARNT.replace(b"a text", b"")[:-8],
    "the terminator": b"data: [DONE]\n\n",
    "a comment": b": ping\n\n",
}


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_decoded(name: str) -> None:
    assert pattern().text(OTHERS[name]) is None


NOT_LEARNT = {
    "a role": event(chunk(ROLE)),
    "a tool call": event(chunk({"content": "x", "tool_calls": [{"index": 0}]})),
    "reasoning": event(chunk({"content": "x", "reasoning_content": "y"})),
    "the end": OTHERS["the end"],
    "another choice": OTHERS["another choice"],
    "two choices": event({**chunk({"content": "x"}), "choices": [*chunk({"content": "x"})["choices"]] * 2}),
    "usage": OTHERS["usage"],
    "an error": event(chunk({"content": "x"}, error={"message": "m"})),
    "an old error": event({**chunk({"content": "x"}), "object": "error"}),
    "transfer parameters": event(chunk({"content": "x"}, kv_transfer_params={"a": 1})),
    "log probabilities": LEARNT.replace(b'"logprobs": null', b'"logprobs": {}'),
    "an escape": OTHERS["a quotation mark"],
    "a text elsewhere": event(chunk({"content": "x"}, system_fingerprint={"content": "x"})).replace(
        b'delta": {"content":', b'delta": {"content" :'
    ),
    "no text": event(chunk({"content": None})),
    "a list": b"data: []\n\n",
    "no JSON": b'data: {"content":\n\n',
    "other line ends": LEARNT.replace(b"\n\n", b"\r\n\r\n"),
}


@pytest.mark.parametrize("name", NOT_LEARNT)
def test_what_is_more_than_text_is_no_pattern(name: str) -> None:
    plain = PlainEvents(CHAT)
    plain.learn(NOT_LEARNT[name])
    assert plain.text(NOT_LEARNT[name]) is None
    assert plain.text(LEARNT) is None
    assert plain.is_learning


def test_a_stream_without_plain_events_is_not_looked_at_for_ever() -> None:
    plain = PlainEvents(CHAT)
    for _ in range(ATTEMPTS):
        assert plain.is_learning
        plain.learn(event(chunk(ROLE)))
    assert not plain.is_learning


@pytest.mark.parametrize("endpoint", [Endpoint.RESPONSES, Endpoint.MESSAGES])
def test_other_endpoints_are_decoded(endpoint: Endpoint) -> None:
    assert not PlainEvents(endpoint).is_learning


class Heard:
    """What a reply key would hash."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def add_text(self, text: str) -> None:
        self.said.append(text)

    def add_reasoning(self) -> None:
        self.said.append("(reasoning)")

    def add_tool_call(self, *call: object) -> None:
        self.said.append(call)


TEXT = st.text(st.sampled_from('ab"\\\n\t é日\x7f{}:,'), max_size=6)
CHUNKS = st.one_of(
    TEXT.map(lambda text: chunk({"content": text})),
    TEXT.map(lambda text: chunk({"content": text}, finish_reason="stop")),
    TEXT.map(lambda text: chunk({"reasoning_content": text})),
    TEXT.map(lambda text: chunk({"content": text}, usage={"prompt_tokens": 3, "completion_tokens": 1})),
    TEXT.map(lambda text: chunk({"content": text}, kv_transfer_params={"a": 1})),
    TEXT.map(lambda text: {"error": {"message": text}}),
    TEXT.map(lambda text: {**chunk({}), "choices": [{"index": 0, "text": text, "finish_reason": None}]}),
    st.just(chunk(ROLE)),
)


@given(
    st.sampled_from([CHAT, COMPLETIONS]),
    st.lists(CHUNKS, max_size=12),
    st.booleans(),
    st.lists(st.integers(1, 400), max_size=8),
)
def test_a_stream_is_relayed_and_read_as_if_all_of_it_were_decoded(
    endpoint: Endpoint, chunks: list[Any], escapes: bool, cuts: list[int]
) -> None:
    data = b"".join(b"data: " + json.dumps(one, ensure_ascii=escapes).encode() + b"\n\n" for one in chunks)
    seen = []
    for recognises in (True, False):
        heard = Heard()
        relay = StreamRelay(endpoint, Edits(hide_usage=True), observer := AnswerObserver(endpoint, heard))
        if not recognises:
            relay._plain._attempts = 0
        out, rest = b"", data
        for size in cuts:
            out, rest = out + relay.feed(rest[:size]), rest[size:]
        for one in rest.splitlines(keepends=True):
            out += relay.feed(one)
        seen.append((out + relay.finish(), heard.said, observer.summary))
    assert seen[0] == seen[1]
