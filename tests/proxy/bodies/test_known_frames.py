"""A chat whose frame is known is the request that reading all of it makes, or is left to that."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ppd.proxy import plane
from ppd.proxy.bodies import known_frames
from ppd.proxy.bodies.known_frames import LONGEST_FRAME_BYTES, MOST_FRAMES, MOST_SAID_BYTES, KnownFrames
from ppd.proxy.config import SessionKey
from ppd.proxy.connectors import plain_leg
from ppd.proxy.errors import RequestError
from ppd.proxy.openai.body_members import SHORT_BYTES, Edited, Members, located, spliced
from ppd.proxy.openai.request import MESSAGES_MEMBER, Endpoint, ReadingRules, Request, label_of, parse_request, scope_of
from ppd.proxy.sessions.hasher import Hasher
from ppd.proxy.sessions.templates import Templates
from ppd.proxy.sessions.text_cuts import cuts_of
from ppd.proxy.sessions.text_kinds import kind_of

pytestmark = pytest.mark.skipif(not plane.IS_BUILT, reason="compiled code finds the frames")
RULES = ReadingRules(hasher=Hasher(b"secret" * 8), tenant="t", depth_limit=None, units_limit=None)
USER, REPLY = {"role": "user", "content": "hi, " * 90}, {"role": "assistant", "content": "ho"}
PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
MARK = "here are the messages"


def chat(*messages: object, **members: object) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **members}).encode()


def parsed(
    body: bytes, headers: Mapping[str, str], rules: ReadingRules = RULES, endpoint: Endpoint = Endpoint.CHAT
) -> Request | None:
    try:
        return parse_request(endpoint, body, headers, rules)
    except RequestError:
        return None


def taught(
    *bodies: bytes,
    rules: ReadingRules = RULES,
    headers: Mapping[str, str] | None = None,
    endpoint: Endpoint = Endpoint.CHAT,
) -> KnownFrames:
    frames = KnownFrames(endpoint)
    for body in bodies:
        assert frames.request(body, headers or {}, rules) is None
        request = parsed(body, headers or {}, rules, endpoint)
        assert request is not None
        for _ in range(2):
            frames.add(body, request, rules)
    return frames


def shown(request: Request) -> tuple[object, ...]:
    chain = request.prompt.chain
    unit = chain.open_unit and (chain.open_unit.key(), chain.open_unit.size)
    return (
        [(name, bytes(raw)) for name, raw in request.fields.items()],
        (chain.keys, chain.ends, chain.marks, tuple(map(kind_of, chain.texts)), unit, list(cuts_of(chain))),
        {name: getattr(request, name) for name in request.__struct_fields__ if name not in ("fields", "prompt")},
        {name: getattr(request.prompt, name) for name in request.prompt.__struct_fields__ if name != "chain"},
        plain_leg(request.endpoint, request.fields, "id").body,
        b"".join(spliced(edited := Edited.of(request.fields, {"stream": msgspec.Raw(b"false")}), edited.original)),
    )


SYSTEMS = st.sampled_from(
    ["Be good.", "", None, 5, [], [{"type": "text", "text": "x" * 5000}, {"type": "tool_use", "id": "c"}]]
)
MEMBERS = st.fixed_dictionaries(
    {"model": st.sampled_from(["m", "other", "rôle"])},
    optional={
        "stream": st.booleans() | st.none(),
        "max_tokens": st.integers(0, 9) | st.just(7.0),
        "n": st.integers(1, 3),
        "temperature": st.floats(0, 2),
        "stop": st.sampled_from([["}", '"messages": ['], "]"]),
        "stream_options": st.just({"include_usage": True}),
        "user": st.sampled_from(['"messages":[]', "é\\"]),
        "cache_salt": st.sampled_from(["", "s"]),
        "prompt_cache_key": st.sampled_from(["k", "", 5]),
        "priority": st.integers(-3, 3),
        "tools": st.just([{"type": "function", "function": {"name": "f"}}]),
        "continue_final_message": st.booleans(),
        "messages ": st.just([]),
        "system": SYSTEMS,
        "instructions": SYSTEMS,
        "metadata": st.just({"user_id": "u"}),
        "conversation": st.just("c") | st.just({"id": "c"}),
        "previous_response_id": st.none() | st.just("resp_1"),
        "truncation": st.sampled_from(["auto", "disabled"]),
    },
)
LONG = "xy\n" * (SHORT_BYTES // 4)  # written with escapes, it is longer than a short body
TEXTS = st.text(max_size=20) | st.sampled_from(["x" * 300, LONG, '"', "\\", "]}", "}, {"])
CONTENTS = TEXTS | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}) | st.just(PART), max_size=2)
CHATS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": CONTENTS},
        optional={"name": TEXTS, "tool_call_id": TEXTS, "x": st.none() | st.integers()},
    )
    | st.fixed_dictionaries(
        {"type": st.sampled_from(["function_call", "function_call_output", "reasoning"]), "output": CONTENTS},
        optional={"call_id": st.sampled_from(["c", "d"]), "role": st.just("user"), "content": CONTENTS},
    ),
    max_size=4,
)
SPANS = st.tuples(st.integers(0, 400), st.integers(0, 6), st.binary(max_size=4))
HEADERS = st.sampled_from([{}, {"x-session-id": "named"}])


@given(
    st.sampled_from([*MESSAGES_MEMBER]),
    MEMBERS,
    st.integers(0, 9),
    CHATS,
    CHATS,
    st.sampled_from([None, 1]),
    st.lists(SPANS, max_size=2),
    HEADERS,
)
def test_a_body_with_a_known_frame_is_the_request_that_reading_all_of_it_makes(
    endpoint: Endpoint,
    members: dict[str, Any],
    place: int,
    first: list[Any],
    second: list[Any],
    indent: int | None,
    spans: Sequence[tuple[int, int, bytes]],
    headers: dict[str, str],
) -> None:
    names = [*members]
    names.insert(place % (len(names) + 1), MESSAGES_MEMBER[endpoint])
    frame = json.dumps({name: members.get(name, MARK) for name in names}, indent=indent)
    one, other = (frame.replace(json.dumps(MARK), json.dumps(said, indent=indent)).encode() for said in (first, second))
    frames = KnownFrames(endpoint)
    frames.request(one, headers, RULES)
    request = parsed(one, headers, endpoint=endpoint)
    if request is not None:
        for _ in range(2):
            frames.add(one, request, RULES)
    for start, size, new in spans:
        other = other[:start] + new + other[start + size :]
    got, expected = frames.request(other, headers, RULES), parsed(other, headers, endpoint=endpoint)
    if got is not None:
        assert expected is not None and shown(got) == shown(expected)
    elif request is not None and expected is not None and not spans:
        assert not members.keys().isdisjoint(("continue_final_message", "previous_response_id"))


def test_a_frame_is_of_one_endpoint() -> None:
    """The same body is another prompt at another one."""
    body = chat(USER, max_tokens=9)
    other = KnownFrames(Endpoint.MESSAGES)
    assert len(taught(body)) == 1 and other.request(body, {}, RULES) is None


def test_the_system_of_a_frame_is_cut_as_where_all_is_read() -> None:
    """Its text is decoded where it is asked for."""
    said = "You are good. " * 300
    first, body = (chat(*more, system=said, max_tokens=9) for more in ([USER], [USER, REPLY, USER]))
    endpoint = Endpoint.MESSAGES
    frames = taught(first, endpoint=endpoint)
    RULES.hasher.known_heads.clear()
    found = frames.request(body, {}, RULES)
    assert found is not None and found.prompt.chain.marks.system == 1
    points = cuts_of(found.prompt.chain)
    RULES.hasher.known_heads.clear()
    RULES.hasher.known_systems.clear()
    expected = parsed(body, {}, endpoint=endpoint)
    assert expected is not None and [*cuts_of(expected.prompt.chain)] == [*points] != []


CLAUDES = {"user_id": '{"session_id": "u"}'}


def items(*said: object, **members: object) -> bytes:
    return json.dumps({"model": "m", "input": said, **members}).encode()


@pytest.mark.parametrize(
    ("endpoint", "first", "body", "name"),
    [
        (Endpoint.MESSAGES, chat(USER, metadata=CLAUDES), chat(USER, REPLY, metadata=CLAUDES), "u"),
        (Endpoint.RESPONSES, items(USER, conversation="c"), items(USER, REPLY, conversation="c"), "c"),
        (Endpoint.RESPONSES, items(USER, conversation={"id": "d"}), items(REPLY, conversation={"id": "d"}), "d"),
    ],
)
def test_each_endpoints_names_of_sessions_are_read(endpoint: Endpoint, first: bytes, body: bytes, name: str) -> None:
    found = taught(first, endpoint=endpoint).request(body, {}, RULES)
    scope = scope_of(endpoint, RULES.hasher, "t", "m")
    expected = parsed(body, {}, endpoint=endpoint)
    assert found is not None and expected is not None and found.prompt.label == expected.prompt.label
    assert found.prompt.label == label_of(RULES.hasher, scope, name)


def test_what_a_stored_response_stands_for_is_read_each_time() -> None:
    body = items(USER, previous_response_id="resp_1")
    assert len(taught(body, endpoint=Endpoint.RESPONSES)) == 0


@pytest.mark.parametrize(
    "item", [{"role": 5}, {"type": 5}, {"type": "function_call", "name": []}, {**USER, "content": 5}]
)
def test_an_item_that_is_refused_is_left_to_reading_all_of_it(item: object) -> None:
    frames, body = taught(items(USER), endpoint=Endpoint.RESPONSES), items(USER, REPLY, item)
    assert frames.request(body, {}, RULES) is None
    with pytest.raises(RequestError):
        parse_request(Endpoint.RESPONSES, body, {}, RULES)


@pytest.mark.parametrize("part", [PART, {"type": "tool_use", "id": "c", "name": "f", "input": {}}])
def test_a_system_that_is_more_than_text_is_read_each_time(part: object) -> None:
    """Its media are named, and its calls have places."""
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "4"}]}
    first, body = (chat(*more, system=[part], max_tokens=9) for more in ([result], [result, REPLY, USER]))
    found = taught(first, endpoint=Endpoint.MESSAGES).request(body, {}, RULES)
    expected = parsed(body, {}, replace(RULES, hasher=Hasher(b"secret" * 8)), Endpoint.MESSAGES)
    assert found is not None and expected is not None and shown(found) == shown(expected)


def test_a_body_that_is_cut_anywhere_is_left_to_reading_all_of_it() -> None:
    body = chat(USER, REPLY, USER, stream=True)
    frames = taught(body)
    for end in range(len(body)):
        assert frames.request(body[:end], {}, RULES) is None
    found = frames.request(body, {}, RULES)
    assert found is not None and found.stream


@pytest.mark.parametrize(
    "body",
    [
        chat(USER, REPLY, continue_final_message=True),
        chat(USER, user="x" * LONGEST_FRAME_BYTES),
        chat(USER, **{"x" * MOST_SAID_BYTES: 1}),
        chat(USER, **{f"{at:0100}": 1 for at in range(MOST_SAID_BYTES // 100 + 1)}),
        chat(USER, cache_salt="x" * MOST_SAID_BYTES),
        chat(USER)[:-1] + b', "model": "other"}',
        chat(USER)[:-1] + b', "messages": ' + json.dumps([USER, REPLY, USER]).encode() + b"}",
        b'{"m\\u006fdel": "m", "messages": ' + json.dumps([USER]).encode() + b"}",
    ],
)
def test_what_is_rendered_long_or_ambiguous_is_read_each_time(body: bytes) -> None:
    assert len(taught(body)) == 0


def test_a_long_body_is_found_by_the_frame_of_a_short_one_and_sent_on_without_being_copied() -> None:
    frames = taught(b'{"stream": true, "messages" : %b, "model": "m"}' % json.dumps([USER]).encode())
    long = b'{"stream": true, "messages" : %b, "model": "m"}' % json.dumps([USER, {**REPLY, "content": LONG}]).encode()
    found, located_there = frames.request(long, {}, RULES), located(long, None)
    assert found is not None and spliced(found.fields, found.fields) == (long,)
    assert isinstance(found.fields, Members) and located_there is not None
    assert found.fields.places == located_there.places
    parts = spliced(Edited.of(found.fields, {"stream": msgspec.Raw(b"false")}), found.fields)
    assert json.loads(b"".join(parts)) == {**json.loads(long), "stream": False}
    assert any(isinstance(part, memoryview) and part.obj is long for part in parts)


def test_an_agents_frame_is_known_with_its_tools_which_are_not_kept() -> None:
    tools = [
        {"type": "function", "function": {"name": f"f{at}", "description": "what it does " * 30}} for at in range(60)
    ]
    call = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f1", "arguments": '{"a": "\\n"}'}}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "found\n" * 1000}
    frames = taught(chat(USER, tools=tools, temperature=0.5))
    ((_, frame),) = frames._known.items()
    assert not frame.values and not frame.request.fields
    for body in (
        chat(USER, call, result, tools=tools, temperature=0.5),
        chat(USER, REPLY, tools=tools, temperature=0.5),
    ):
        found, expected = frames.request(body, {}, RULES), parsed(body, {})
        assert found is not None and expected is not None and shown(found) == shown(expected)
        assert spliced(found.fields, found.fields) == (body,)
    assert frames.request(chat(USER, tools=tools[1:], temperature=0.5), {}, RULES) is None


def test_the_tools_of_all_frames_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_frames, "MOST_UNITS", 5)
    frames = KnownFrames(Endpoint.CHAT)
    for number, count in enumerate((2, 3, 2)):
        tools = [{"type": "function", "function": {"name": f"f{number}-{at}"}} for at in range(count)]
        body = json.dumps({"model": "m", "tools": tools, "messages": [USER]}).encode()
        request = parsed(body, {})
        assert request is not None
        for _ in range(2):
            frames.add(body, request, RULES)
        frames.add(body, request, RULES)  # is known, and counts once
        assert len(frames) == len(frames._starts) == (1, 2, 1)[number]


TOOL = {"role": "tool", "content": [{"type": "text", "text": "one"}, {"type": "a", "b": [[]]}]}


@pytest.mark.parametrize("more", [[], [TOOL]], ids=["texts alone", "and another message"])
def test_a_body_with_too_much_in_it_is_left_to_reading_all_of_it(more: list[object]) -> None:
    frames, body = taught(chat(USER)), chat(USER, REPLY, {**USER, "content": "\n" * 50}, *more)
    depth, _, weighs = plane.bones(body)
    room, deep = weighs + 9, max(depth, 6)  # what is counted twice; as deep as a plain message can be
    assert frames.request(body, {}, RULES, most=room, depth_limit=deep - 1) is None
    for _ in range(2):  # then all of its messages are known
        assert frames.request(body, {}, RULES, most=weighs - 1, depth_limit=deep) is None
        assert frames.request(body, {}, RULES, most=room, depth_limit=deep) is not None


def test_a_frame_keeps_nothing_of_the_messages() -> None:
    frames = taught(chat({"role": "user", "content": "a secret"}, stream=True))
    ((name, frame),) = frames._known.items()
    assert b"a secret" not in b"".join([*name[2:], *map(bytes, frame.values.values())])
    assert frame.request.prompt.chain.keys == (0,)
    assert not frame.request.prompt.chain.texts


def test_a_frame_counts_for_its_tenant_its_salt_and_one_set_of_names() -> None:
    body, again = chat(USER), chat(USER, REPLY, USER)
    frames = taught(body)
    assert frames.request(again, {}, RULES) is not None
    assert frames.request(again, {}, replace(RULES, tenant="u")) is None
    assert frames.request(again, {}, replace(RULES, salted=str.upper)) is None
    assert frames.request(again, {}, RULES) is not None
    assert frames.request(again, {}, replace(RULES, aliases={"m": "n"})) is None
    assert len(frames) == 0
    frames = taught(body)
    assert frames.request(again, {}, replace(RULES, templates=Templates(("m",)))) is None


def test_a_session_that_is_known_by_its_opener_is_read_each_time() -> None:
    assert len(taught(chat(USER), rules=replace(RULES, session_key=SessionKey.FIRST_USER_MESSAGE))) == 0


def test_an_id_of_the_body_is_read_where_no_header_has_one() -> None:
    first, body = chat(USER, conversation_id={}), chat(USER, REPLY, USER, conversation_id={})
    frames = taught(first, headers={"x-session-id": "named"})
    found = frames.request(body, {"x-session-id": "other"}, RULES)
    scope = scope_of(Endpoint.CHAT, RULES.hasher, "t", "m")
    assert found is not None and found.prompt.label == label_of(RULES.hasher, scope, "other")
    assert frames.request(body, {}, RULES) is None and parsed(body, {}) is None


def test_frames_are_bounded() -> None:
    frames = KnownFrames(Endpoint.CHAT)
    for number in range(MOST_FRAMES + 1):
        body = chat(USER, seed=number)
        frames.request(body, {}, RULES)
        request = parsed(body, {})
        assert request is not None
        for _ in range(2):
            frames.add(body, request, RULES)
    assert len(frames) == 1


def test_a_frame_that_comes_once_is_not_learned() -> None:
    body = chat(USER)
    request = parsed(body, {})
    assert request is not None
    frames = KnownFrames(Endpoint.CHAT)
    frames.add(body, request, RULES)
    assert len(frames) == 0
    frames.add(chat(USER, REPLY, USER), request, RULES)
    assert len(frames) == 1
