"""Items of Responses: as compiled code finds them, as decoding does, and as they are known from an earlier prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy import plane
from ppd.proxy.errors import RequestError
from ppd.proxy.openai.prompts.items import THOUGHT, CallItem, message_of
from ppd.proxy.openai.prompts.messages import read_items, read_messages, whole
from ppd.proxy.openai.prompts.reader import PromptReader
from ppd.proxy.openai.prompts.shapes import ITEMS, PromptMessage
from ppd.proxy.sessions.hasher import Hasher
from ppd.proxy.sessions.templates import PLAIN, Template
from ppd.proxy.sessions.text_cuts import cuts_of
from ppd.proxy.sessions.text_kinds import kind_of
from tests.support.requests import assistant, call, user

needs_digests = pytest.mark.skipif(not plane.IS_FAST, reason="items have no digests where nothing is compiled")

SECRET = b"s" * 32
HASHER = Hasher(SECRET)
PRINTING = Template(prints_call_ids=True)
IDS = st.sampled_from(["c1", "c2", "", "é", None])
TEXT = st.sampled_from(["", "a", "Über \n9 {}", "x" * 300, "y" * 5000])
KINDS = ("input_text", "output_text", "text", "input_image", "refusal", "reasoning")
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS), "text": TEXT}, optional={"annotations": st.just([]), "image_url": st.just("u")}
)
CONTENT = TEXT | st.lists(PART | TEXT, max_size=2) | st.none()
OWN = {"id": TEXT | st.none(), "status": st.sampled_from(["completed", None])}
ROLES = st.sampled_from(["user", "assistant", "system", "developer", "tool", "rôle", ""])
CALL = {"call_id": IDS, "name": st.sampled_from(["f", None]), "arguments": st.sampled_from(['{"a": 1}', "", "{"])}


def item(*kinds: str, **members: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.sampled_from(kinds), **members}, optional=OWN)


ITEM = st.one_of(
    st.fixed_dictionaries(
        {"role": ROLES, "content": CONTENT}, optional={"type": st.just("message") | st.none(), "name": TEXT, **OWN}
    ),
    item("message", role=ROLES, content=CONTENT),
    item("function_call", **CALL),
    item("custom_tool_call", call_id=IDS, input=TEXT),
    item("function_call_output", "custom_tool_call_output", "shell_output", call_id=IDS, output=CONTENT),
    item("function_call_output", "message", role=ROLES, call_id=IDS, output=CONTENT, content=CONTENT),
    item("function_call_output", "message", call_id=IDS, name=TEXT, output=CONTENT, role=ROLES),
    item("reasoning", encrypted_content=TEXT, summary=st.just([])),
    item("web_search_call", "local_shell_call", "computer_call_output", call_id=IDS, action=PART),
    item("item_reference", "compaction", text=TEXT),
)
SPANS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 6), st.binary(max_size=3)), max_size=2)


def changed(data: bytes, spans: Sequence[tuple[int, int, bytes]]) -> bytes:
    for start, size, new in spans:
        data = data[:start] + new + data[start + size :]
    return data


def raw(items: object) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(items).encode())


def decoded(data: bytes) -> list[PromptMessage] | None:
    try:
        items = ITEMS.decode(data)
        return [message_of(one) for one in items if isinstance(one, dict)]
    except (RequestError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def found(data: bytes) -> list[Any] | None:
    try:
        return read_items(msgspec.Raw(data), HASHER)
    except RequestError:
        return None


def read(hasher: Hasher, items: object, template: Template = PLAIN, stored: int | None = None) -> tuple[Any, ...]:
    reader = PromptReader(hasher, template)
    chain = reader.responses(reader.head("", {}), read_items(raw(items), hasher), None, stored)
    kinds = tuple(map(kind_of, chain.texts))
    return tuple(chain.keys), chain.ends, chain.marks, kinds, list(cuts_of(chain)), reader.content.has_media


def alone(message: Any) -> tuple[Any, ...]:
    """What it is read as by itself: key, size and letter, whether it is or holds media, its role, and its round."""
    reader, one = PromptReader(Hasher(SECRET)), whole(message)
    try:
        read = reader._message(1, message)
    except RequestError as exc:  # of values that are not decoded before
        return (str(exc),)
    return read, reader.content.has_media, one.role, isinstance(one, CallItem)


@given(st.lists(ITEM, max_size=4), st.booleans(), st.sampled_from([None, 1]), SPANS)
def test_items_are_those_that_decoding_finds(items: list[Any], is_ascii: bool, indent: int | None, spans: Any) -> None:
    data = changed(json.dumps(items, ensure_ascii=is_ascii, indent=indent).encode(), spans)
    expected, got = decoded(data), found(data)
    assert (expected is None) is (got is None)
    for one, other in zip(got or (), expected or (), strict=True):
        assert (whole(one) is THOUGHT) is (other is THOUGHT)
        assert alone(one) == alone(other)


@given(
    st.lists(ITEM, min_size=1, max_size=8),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.none() | st.just(99),
)
def test_items_that_grow_have_the_chains_of_items_that_come_once(
    items: list[Any], prints: list[bool], stored: int | None
) -> None:
    hasher = Hasher(SECRET)
    for turn, printing in zip(range(1, len(items) + 1), prints, strict=False):
        template = PRINTING if printing else PLAIN
        expected = read(Hasher(SECRET), items[:turn], template, stored)
        assert read(hasher, items[:turn], template, stored) == expected
        assert read(hasher, items[:turn], template, stored) == expected


@given(st.lists(ITEM, min_size=1, max_size=6), st.booleans())
def test_items_have_the_same_chain_where_nothing_is_compiled(items: list[Any], printing: bool) -> None:
    template = PRINTING if printing else PLAIN
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plane, "IS_BUILT", False)
        expected = read(Hasher(SECRET), items, template)
    assert read(Hasher(SECRET), items, template) == expected


@needs_digests
@pytest.mark.parametrize(
    ("data", "is_plain"),
    [
        (b'{"role":"user","content":"a"}', True),
        (b'{"type":"message","role":"user","content":[{"type":"input_text","text":"a"}]}', True),
        (b'{"id":"m","type":"message","status":"completed","role":"assistant","content":"a"}', True),
        (b'{"type":null,"role":"user","content":"a","call_id":null,"id":null}', True),
        (b'{"type":"function_call_output","call_id":"c","output":"a"}', True),
        (b'{"type":"custom_tool_call_output","output":"a","id":"o","status":"completed"}', True),
        (b'{"type":"function_call_output","call_id":"c","output":[{"type":"input_text","text":"a"}]}', True),
        (b'{"type":"function_call_output","call_id":"c","output":null}', False),
        (b'{"type":"function_call_output","call_id":"c"}', False),
        (b'{"type":"function_call_output","call_id":"c","output":"a","content":"b"}', False),
        (b'{"type":"function_call_output","call_id":"c","output":"a","role":"user"}', False),
        (b'{"type":"function_call_output","call_id":"c","output":"a","name":"n"}', False),
        (b'{"type":"function_call_output","call_id":"\\u0061","output":"a"}', False),
        (b'{"type":"function_call_output","call_id":"c","call_id":"d","output":"a"}', False),
        (b'{"type":"function_call_output","output":"a","output":"b"}', False),
        (b'{"type":"function_call_output","output":"a","acknowledged":"b"}', False),
        (b'{"type":"mcp_output","output":"a"}', False),
        (b'{"type":"message","output":"a"}', False),
        (b'{"output":"a"}', False),
        (b'{"type":"message","role":"user","content":"a","call_id":"c"}', False),
        (b'{"type":"message","role":"user","content":"a","output":"b"}', False),
        (b'{"type":"message","role":"user"}', False),
        (b'{"type":"message","content":"a"}', False),
        (b'{"type":"odd","role":"user","content":"a"}', False),
        (b'{"type":"mess\\u0061ge","role":"user","content":"a"}', False),
        (b'{"role":"user","content":"a","tool_call_id":"c"}', False),
        (b'{"role":"user","content":"a","id":"\\u0061"}', False),
        (b'{"role":"user","content":"a","status":1}', False),
    ],
)
def test_an_item_that_is_one_text_is_not_decoded(data: bytes, is_plain: bool) -> None:
    told = plane.messages(b"[%b]" % data, are_items=True)
    assert told is not None
    assert isinstance(told[0][0], plane.PlainMessage) is is_plain
    item, expected = found(b"[%b]" % data), decoded(b"[%b]" % data)
    assert item is not None and expected is not None
    assert alone(item[0]) == alone(expected[0])


def codex(at: int) -> list[Any]:
    return [
        {"type": "reasoning", "summary": [], "encrypted_content": f"{at}" * 40},
        {"type": "function_call", "call_id": f"c{at}", "name": "f", "arguments": '{"a": "b"}'},
        {"type": "function_call", "call_id": f"d{at}", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": f"c{at}", "output": "so " * at},
        {"type": "function_call_output", "call_id": f"d{at}", "output": [{"type": "input_text", "text": "no"}]},
    ]


@needs_digests
def test_what_came_before_is_not_decoded() -> None:
    items, hasher = [user("Find it."), *codex(1), *codex(2), *codex(3)], Hasher(SECRET)
    read(hasher, items)
    again = read_items(raw([*items, *codex(9)]), hasher)
    found = [one for one in again if isinstance(one, plane.FoundMessage)]
    assert [one.unit is None for one in found] == [False] * 9 + [True] * 3
    reader = PromptReader(hasher)
    reader.responses(reader.head("", {}), [*again], None, None)
    assert [one.decoded is not None for one in found] == [False] * 9 + [True] * 3


@needs_digests
def test_an_item_is_not_taken_for_a_message_with_the_same_bytes() -> None:
    """An item has no calls: a member of that name means nothing."""
    both, hasher = [assistant("a", tool_calls=[call()]), user("b")], Hasher(SECRET)
    reader = PromptReader(hasher)

    def as_chat() -> tuple[int, ...]:
        return tuple(reader.chat(reader.head("", {}), read_messages(raw(both), hasher), prefills=False).keys)

    chat, items = as_chat(), read(hasher, both)[0]
    assert chat != items
    assert (as_chat(), read(hasher, both)[0]) == (chat, items)
    (message, _), (item, _) = read_messages(raw(both), hasher), read_items(raw(both), hasher)
    assert isinstance(message, plane.FoundMessage) and isinstance(item, plane.FoundMessage)
    assert message.unit is not item.unit is not None


@pytest.mark.parametrize(
    ("items", "reasons"),
    [
        ([user("a"), codex(1)[0], assistant("b")], True),
        ([user("a"), assistant("b")], False),
        ([user("a"), *codex(1)[:3]], True),
        ([user("a"), codex(1)[0], assistant("b"), codex(1)[1], user("c")], True),
        ([user("a"), assistant("b"), codex(1)[0], codex(1)[1], user("c")], True),
        ([codex(1)[0], user("a"), assistant("b")], False),
        ([codex(1)[0], assistant("b"), user("a"), assistant("c"), user("d")], False),
        ([user("a"), assistant("b"), codex(1)[0]], False),
        ([user("a"), assistant("b"), codex(1)[0], user("c")], False),
    ],
)
def test_a_reply_comes_with_the_reasoning_before_any_of_its_items(items: list[Any], reasons: bool) -> None:
    hasher = Hasher(SECRET)
    for _ in range(2):
        assert read(hasher, [user("first"), *items])[2].reasons is reasons
        assert read(hasher, [{"role": "system", "content": "s"}, user("first"), *items])[2].reasons is reasons
        assert read(hasher, items, stored=9)[2].reasons is reasons


def test_the_same_id_in_one_round_is_two_calls() -> None:
    """Calls that follow one another are of one round, and each result is of the first without one."""
    said = [user("b"), user("b", name="n"), user([{"type": "odd"}])]

    def keys(*ids: str, between: Sequence[Any] = ()) -> tuple[int, ...]:
        calls = [{"type": "function_call", "call_id": id, "name": "f"} for id in ids]
        results = [{"type": "function_call_output", "call_id": id, "output": "4"} for id in ids]
        return tuple(read(HASHER, [user("a"), calls[0], *between, *calls[1:], *results])[0])

    for _ in range(2):
        assert keys("a", "a") == keys("a", "b")
        for one in said:
            assert keys("a", "a", between=[one]) != keys("a", "b", between=[one])


@pytest.mark.parametrize(
    ("item", "place"),
    [
        ({"type": "web_search_call", "action": {"query": "q"}}, "last_reply"),
        ({"type": "local_shell_call", "call_id": "c", "action": {}}, "last_reply"),
        (codex(1)[1], "last_reply"),
        (codex(1)[3], ""),
        (user([]), "last_user"),
        (user(None), "last_user"),
        (assistant("b"), "last_reply"),
        ({"type": "compaction", "text": "a"}, ""),
    ],
)
def test_who_says_an_item_is_known(item: dict[str, Any], place: str) -> None:
    hasher = Hasher(SECRET)
    for _ in range(2):
        marks = read(hasher, [user("a"), assistant("b"), item])[2]
        assert marks.last_reply == (3 if place == "last_reply" else 2)
        assert marks.last_user == (3 if place == "last_user" else 1)


@needs_digests
def test_known_reasoning_weighs_what_it_did() -> None:
    hasher, items = Hasher(SECRET), [{"type": "reasoning", "summary": [1, 2, 3]}, user("a")]
    for _ in range(2):
        data = raw(items)
        found = plane.messages_at(data, 0, 99, hasher.point, hasher.known_units.find, are_items=True)
        read(hasher, items)
    assert found is not None and found[1] == []
    assert 0 <= found[3] - plane.bones(data)[2] <= 9, "some is counted twice"
