"""Messages that came before are read from what is kept of them: to the same chain, and without being decoded."""

from __future__ import annotations

import json
import tracemalloc
from itertools import chain as joined
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy import plane
from ppd.proxy.openai.prompts.messages import read_messages
from ppd.proxy.openai.prompts.reader import PromptReader
from ppd.proxy.sessions.hasher import PLACE_BYTES, Hasher
from ppd.proxy.sessions.message_units import KEPT_BYTES, CallPlaces, MessageUnit
from ppd.proxy.sessions.prompt_head import Head
from ppd.proxy.sessions.templates import PLAIN, Template
from ppd.proxy.sessions.text_cuts import cuts_of
from ppd.proxy.sessions.text_kinds import kind_of
from tests.support.requests import assistant, call, text, user

pytestmark = pytest.mark.skipif(not plane.IS_FAST, reason="messages have no digests where nothing is compiled")

SECRET = b"s" * 32
PRINTING = Template(prints_call_ids=True)
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
IDS = st.sampled_from(["", "c1", "c2", "c3", "é"])
TEXT = st.sampled_from(["", "a", "Über 9 {}", "x" * 300, "y" * 5000, "x-anthropic-billing-header: 1"])


def use(id: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "f", "input": {"n": [1.0, "é"]}}


def result(id: str, said: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": said, **more}


PARTS = st.lists(
    TEXT.map(text)
    | st.just(PICTURE)
    | st.just({"type": "odd", "uuid": "u"})
    | st.just({**use("c1"), "uuid": "u"})
    | st.just({"type": "thinking", "thinking": "so"})
    | IDS.map(use)
    | st.builds(result, IDS, TEXT | st.lists(TEXT.map(text) | st.just(PICTURE), max_size=2))
    | st.builds(result, IDS, TEXT, is_error=st.booleans()),
    max_size=3,
)
CONTENT = TEXT | PARTS | st.none()
CALLS = st.lists(
    st.builds(call, IDS, st.sampled_from(["f", ""]), st.sampled_from(['{"a": 1}', '{ "a":1 }', "", "{"])), max_size=3
)
MESSAGE = st.one_of(
    st.builds(user, CONTENT),
    st.builds(assistant, CONTENT),
    st.builds(assistant, CONTENT, tool_calls=CALLS),
    st.builds(assistant, CONTENT, reasoning_content=TEXT),
    st.builds(assistant, st.none(), function_call=st.just({"name": "f", "arguments": "{}"})),
    st.builds(lambda id, said: {"role": "tool", "tool_call_id": id, "content": said}, IDS, CONTENT),
    st.builds(lambda role, said: {"role": role, "content": said}, st.sampled_from(["system", "developer"]), CONTENT),
)


def read(hasher: Hasher, chat: list[Any], template: Template = PLAIN, *, prefills: bool = False) -> tuple[Any, ...]:
    reader = PromptReader(hasher, template)
    messages = read_messages(msgspec.Raw(json.dumps(chat).encode()), hasher)
    chain = reader.chat(reader.head("", {}), messages, prefills=prefills)
    unit = chain.open_unit and (chain.open_unit.key(), chain.open_unit.size)
    kinds = tuple(map(kind_of, chain.texts))
    return tuple(chain.keys), chain.ends, chain.marks, kinds, unit, list(cuts_of(chain)), reader.content.has_media


@given(st.lists(MESSAGE, min_size=1, max_size=8), st.booleans(), st.lists(st.booleans(), min_size=8, max_size=8))
def test_a_chat_that_grows_has_the_chains_of_chats_that_come_once(
    chat: list[Any], prefills: bool, prints: list[bool]
) -> None:
    hasher = Hasher(SECRET)
    for turn, printing in zip(range(1, len(chat) + 1), prints, strict=False):
        template = PRINTING if printing else PLAIN
        expected = read(Hasher(SECRET), chat[:turn], template, prefills=prefills)
        assert read(hasher, chat[:turn], template, prefills=prefills) == expected
        assert read(hasher, chat[:turn], template, prefills=prefills) == expected


def in_openais_form(at: int) -> list[Any]:
    calls = [call(f"c{at}"), call(f"d{at}", arguments='{"a": "b"}')]
    return [
        assistant("I look.", tool_calls=calls),
        *({"role": "tool", "tool_call_id": one["id"], "content": "so " * at} for one in calls),
    ]


def in_anthropics_form(at: int) -> list[Any]:
    return [
        assistant([text("I look."), use(f"c{at}"), use(f"d{at}")]),
        user([result(f"c{at}", "so " * at), result(f"d{at}", [text("no")], is_error=True)]),
    ]


@pytest.mark.parametrize("form", [in_openais_form, in_anthropics_form])
def test_what_came_before_is_not_decoded(form: Any) -> None:
    chat = [user("Find it."), *joined.from_iterable(map(form, range(1, 5)))]
    hasher = Hasher(SECRET)
    read(hasher, chat)
    messages = read_messages(msgspec.Raw(json.dumps([*chat, *form(9)]).encode()), hasher)
    found = [one for one in messages if isinstance(one, plane.FoundMessage)]
    new = [one for one in form(9) if not isinstance(one["content"], str) or "tool_calls" in one]
    assert [one.unit is None for one in found] == [False] * (len(found) - len(new)) + [True] * len(new)
    known = messages[: len(chat)]
    PromptReader(hasher).chat(PromptReader(hasher).head("", {}), [*messages], prefills=False)
    last_reply = max(at for at, one in enumerate(known) if form(1)[0]["role"] == "assistant" and at < len(known) - 1)
    decoded = [at for at, one in enumerate(known) if isinstance(one, plane.FoundMessage) and one.decoded is not None]
    assert all(at >= last_reply - 1 for at in decoded), "only what stands before the newest reply is looked at"


@pytest.mark.parametrize("form", [in_openais_form, in_anthropics_form])
def test_who_said_what_came_before_is_known(form: Any) -> None:
    """Results of tools are not by the user, whoever sends them."""
    chat, hasher = [user("Find it."), *form(1), user([text("a"), text("b")]), *form(2), *form(3)], Hasher(SECRET)
    for _ in range(2):
        marks = read(hasher, chat)[2]
        last = max(at for at, one in enumerate(chat) if one["role"] == "assistant")
        assert (marks.first_user, marks.last_user, marks.last_reply) == (1, 2 + len(form(1)), last + 1)


@pytest.mark.parametrize(
    ("message", "is_kept"),
    [
        (assistant("I look.", tool_calls=[call()]), True),
        (user([text("a"), text("b")]), True),
        (user([text("a"), text("b" * 4096)]), True),
        (user([text("a"), text("b" * 4097)]), False),  # which can be cut, so the text would be kept too
        (user([result("c1", "b" * 5000)]), True),  # which cannot
        (user([text("a"), PICTURE]), False),
        (user([{**use("c1"), "uuid": "u"}]), False),
        (assistant("a", tool_calls=[call("c" * KEPT_BYTES)]), False),
        (assistant("a", tool_calls=[call(str(at)) for at in range(KEPT_BYTES)]), False),
        (user([result("c" * KEPT_BYTES, "a")]), False),
        (user([text("a")] * (KEPT_BYTES // 17)), False),
        (user([text("a")] * (KEPT_BYTES // 34)), True),
        (user([result("c1", [text("a")] * (KEPT_BYTES // 17))]), False),
        (user([result("c1", [text("a")] * (KEPT_BYTES // 34))]), True),
        ({"role": "r" * KEPT_BYTES, "content": [text("a"), text("b")]}, False),
        (user([text("a"), text("b")], name="n" * KEPT_BYTES), False),
    ],
)
def test_no_more_is_kept_than_a_few_hundred_bytes(message: dict[str, Any], is_kept: bool) -> None:
    hasher = Hasher(SECRET)
    read(hasher, [message, user("hi")])
    (found, _) = read_messages(msgspec.Raw(json.dumps([message, user("hi")]).encode()), hasher)
    assert isinstance(found, plane.FoundMessage)
    assert (found.unit is not None) is is_kept
    if found.unit is not None:
        assert len(found.unit) <= KEPT_BYTES
        assert not any(said in found.unit for said in (b"I look", b"bbbb", b"{}")), "nor any text"


def test_a_unit_is_kept_as_far_as_there_is_room() -> None:
    hasher, sizes = Hasher(SECRET), list[int | None]()
    for count in range(KEPT_BYTES // 13 - 9, KEPT_BYTES // 13 + 9):  # a call takes 13 bytes
        unit = MessageUnit(hasher, "assistant", "", "")
        for _ in range(count):
            unit.add_call("c1", 5, 1, CallPlaces())
        packed = unit.packed(weighs=1)
        sizes.append(None if packed is None else len(packed))
    kept = [size for size in sizes if size is not None]
    assert sizes == [*range(kept[0], KEPT_BYTES + 1, 13)] + [None] * (18 - len(kept)) and 0 < len(kept) < 18


@pytest.mark.parametrize(
    "message",
    [
        assistant("a", tool_calls=[call("c1")]),
        assistant("a", tool_calls=[call("") for _ in range(6)]),
        assistant("a", tool_calls=[call(f"\U0001f600{at}") for at in range(5)]),
        user([result(f"c{at}", "a") for at in range(3)]),
        user([text(str(at)) for at in range(90)]),
    ],
)
def test_known_messages_take_no_more_memory_than_they_are_said_to(message: dict[str, Any]) -> None:
    hasher, count = Hasher(SECRET), 300
    reader = PromptReader(hasher)
    head = reader.head("", {})
    raws = [msgspec.Raw(json.dumps([{**message, "name": f"n{at}"}]).encode()) for at in range(count)]
    PromptReader(hasher).chat(head, read_messages(raws[0], hasher), prefills=False)
    before = taken(raws[1:], hasher, head)
    told = sum(PLACE_BYTES + len(unit) for unit in hasher.known_units._newer.values())
    assert len(hasher.known_units) == count
    assert 0.4 * told < before < told


def taken(raws: list[msgspec.Raw], hasher: Hasher, head: Head) -> int:
    """Bytes that reading them leaves behind."""
    tracemalloc.start()
    try:
        for raw in raws:
            PromptReader(hasher).chat(head, read_messages(raw, hasher), prefills=False)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_known_messages_weigh_what_they_did() -> None:
    hasher, heavy = Hasher(SECRET), {**use("c1"), "input": [0] * 90}
    raw = json.dumps([user([text("a"), heavy]), user("hi")]).encode()
    read(hasher, json.loads(raw))
    weighs = plane.bones(raw)[2]
    for most, is_read in ((weighs + 9, True), (weighs - 1, False)):
        found = plane.messages_at(raw, 0, most, hasher.point, hasher.known_units.find)
        assert (found is not None) is is_read
        assert found is None or (found[1] == [] and found[3] - weighs <= 9)
