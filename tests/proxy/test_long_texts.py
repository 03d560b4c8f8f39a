from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ppd.proxy.errors import RequestError
from ppd.proxy.long_texts import PIECE_BYTES, LongText, long_text, may_hold_long
from request_bodies import CHAT, MESSAGES, assistant, keys, parse, parse_bytes, text, user

LONG = 300_000
SNIPPETS = [
    "a word ",
    "x",
    "\n",
    '"',
    "\\",
    "\\n",
    "é",
    "世界",
    "😀",
    "\u0000",
    "\\u0041 ",
    "\\\\ud83d\\ude00",
    "abcdefghijklm",
]


def said(raw: bytes) -> bytes:
    return b"".join(LongText(msgspec.Raw(raw)).pieces())


@given(
    snippets=st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=20), min_size=1, max_size=6),
    shift=st.integers(0, 40),
    is_ascii=st.booleans(),
)
@example(snippets=["😀"], shift=0, is_ascii=True)
@example(snippets=["😀"], shift=1, is_ascii=False)
@example(snippets=["\\"], shift=1, is_ascii=False)
@example(snippets=["abcdefghijklm😀"], shift=3, is_ascii=True)
def test_a_text_in_pieces_is_the_same_text(snippets: list[str], shift: int, is_ascii: bool) -> None:
    block = "".join(snippets).encode("utf-8", "ignore").decode()
    whole = "-" * shift + block * (2 + 3 * PIECE_BYTES // max(1, len(block)))
    assert said(json.dumps(whole, ensure_ascii=is_ascii).encode()) == whole.encode()


def test_no_piece_is_larger_than_it_needs_to_be() -> None:
    words = json.dumps("some words\n" * 10_000).encode()
    assert max(map(len, LongText(msgspec.Raw(words)).pieces())) <= PIECE_BYTES


@pytest.mark.parametrize("end", ["\xff", "\xe4\xb8", "\xed\xa0\x80"])
def test_what_is_not_utf8_is_refused(end: str) -> None:
    content = b"x " * LONG + end.encode("latin-1")
    with pytest.raises(RequestError) as caught:
        parse_bytes(b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % content)
    assert caught.value.param == "messages"


def test_what_counts_as_a_long_text() -> None:
    assert long_text(msgspec.Raw(b'"%b"' % (b"x" * PIECE_BYTES))) is not None
    assert long_text(msgspec.Raw(b'"%b"' % (b"x" * (PIECE_BYTES - 2)))) is None
    assert long_text(msgspec.Raw(b'["%b"]' % (b"x" * PIECE_BYTES))) is None


@pytest.mark.parametrize(
    ("messages", "may"),
    [
        ([user("x" * LONG)], True),
        ([user("x" * 1000)] * 300, False),
        ([*[user("x" * 1000)] * 300, user("x" * LONG)], True),
        ([user("x" * 100_000)], False),
    ],
)
def test_where_a_long_text_is_looked_for(messages: list[dict[str, Any]], may: bool) -> None:
    assert may_hold_long(msgspec.Raw(json.dumps(messages).encode())) is may


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("said", ["word " * 80_000, "Grüße,\n世界 😀 " * 30_000, "x" * LONG])
def test_a_long_text_has_the_key_of_the_same_text_in_parts_of_content(role: str, said: str) -> None:
    whole = {"role": role, "content": said, "name": "n"}
    in_parts = {**whole, "content": [text(said)]}
    assert keys(user("a"), whole, user("b")) == keys(user("a"), in_parts, user("b"))
    assert keys(user("a"), whole) != keys(user("a"), {**whole, "content": said[:-1] + "!"})


def test_what_else_is_in_messages_with_a_long_text_counts_as_ever() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    rest = [assistant(None, tool_calls=calls), {"role": "tool", "tool_call_id": "c", "content": "r"}, assistant("")]
    alone, behind = parse(CHAT, [*rest]), parse(CHAT, [*rest, user("x" * LONG)])
    assert behind.chain.keys[: len(rest)] == alone.chain.keys
    assert behind.chain.ends[: len(rest)] == alone.chain.ends
    assert behind.prompt_bytes - alone.prompt_bytes == LONG + 16


def test_a_billing_header_is_left_out_of_a_long_system_prompt_too() -> None:
    header = "x-anthropic-billing-header: " + "x" * LONG
    assert keys({"role": "system", "content": header}) == keys({"role": "system", "content": ""})


def test_a_long_reply_that_the_client_began_can_go_on() -> None:
    begun = parse(MESSAGES, [user("a"), assistant("word " * 80_000)]).chain.open_unit
    assert begun is not None
    begun.add_text("end")
    whole = parse(MESSAGES, [user("a"), assistant("word " * 80_000 + "end"), user("b")])
    assert begun.key() == whole.chain.keys[1]
