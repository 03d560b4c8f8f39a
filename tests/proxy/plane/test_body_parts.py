"""Members and messages found by compiled code: what decoding finds, and nothing where decoding refuses."""

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
from ppd.proxy.openai.body_members import SHORT_BYTES, Members, located
from ppd.proxy.openai.prompts.messages import read_messages, whole
from ppd.proxy.openai.prompts.shapes import MESSAGES, PromptMessage
from ppd.proxy.openai.request import Endpoint, ReadingRules, parse_request, request_of
from ppd.proxy.sessions.hasher import Hasher
from ppd.proxy.sessions.text_cuts import cuts_of
from ppd.proxy.sessions.text_kinds import kind_of

FIELDS = dict[str, msgspec.Raw]
RULES = ReadingRules(hasher=Hasher(b"secret" * 8), tenant="")
LONG = "x" * SHORT_BYTES

TEXTS = st.text(max_size=40) | st.sampled_from(
    ['"', "\\", "\n" * 17, "é" * 9, "𐀀", "{[", "]}", "x" * 16, "\\" * 15 + '"']
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
TEXT_KINDS = (b'"text"', b'"input_text"', b'"output_text"')
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "input_text", "output_text", "thinking", "tool_use"]), "text": TEXTS | st.none()},
    optional={
        "cache_control": st.none() | st.just({"type": "ephemeral", "ttl": "5m"}) | VALUES,
        "citations": st.none(),
        "uuid": st.none() | TEXTS,
    },
)
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "rôle", ""])
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
OTHERS = {
    "name": st.none() | TEXTS,
    "tool_call_id": st.none() | TEXTS,
    "tool_calls": st.none() | st.just([CALL]),
    "reasoning": st.none() | TEXTS,
    "refusal": VALUES,
}
CONTENTS = st.none() | TEXTS | st.lists(PART, max_size=2) | VALUES
MESSAGE = st.fixed_dictionaries({"role": ROLES, "content": CONTENTS}, optional=OTHERS)
SPANS = st.tuples(st.integers(0, 400), st.integers(0, 6), st.binary(max_size=4))
"""Where bytes are taken away, how many, and what is put in their place."""


def changed(data: bytes, spans: Sequence[tuple[int, int, bytes]]) -> bytes:
    for start, size, new in spans:
        data = data[:start] + new + data[start + size :]
    return data


def written(value: object, is_ascii: bool, indent: int | None) -> bytes:
    return json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode()


def decoded(raw: bytes) -> list[PromptMessage] | None:
    try:
        return MESSAGES.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def found(raw: bytes) -> list[Any] | None:
    try:
        return read_messages(msgspec.Raw(raw), RULES.hasher)
    except RequestError:
        return None


def one_text(parts: list[Any]) -> bytes | None:
    """A list with a text and nothing else is the same content as the text, written as a string."""
    if len(parts) != 1 or not isinstance(parts[0], dict) or not {"type", "text"} <= parts[0].keys():
        return None
    (part,) = parts
    if part.keys() - {"type", "text", "cache_control"} or bytes(part["type"]) not in TEXT_KINDS:
        return None
    text = msgspec.json.decode(part["text"])
    return text.encode() if isinstance(text, str) else None


def shown(found: Any) -> tuple[object, ...]:
    message: Any = whole(found)
    calls = message.tool_calls and [(call.id, call.function and call.function.name) for call in message.tool_calls]
    parts, utf8 = message.content, message.utf8
    if isinstance(parts, list) and (text := one_text(parts)) is not None:
        parts, utf8 = text.decode(), text
    if isinstance(parts, list):
        parts = [{k: bytes(raw) for k, raw in part.items()} if isinstance(part, dict) else part for part in parts]
    return message.role, parts, message.name, message.tool_call_id, calls or None, utf8


@given(st.lists(MESSAGE, max_size=4), st.booleans(), st.sampled_from([None, 1]), st.lists(SPANS, max_size=2))
def test_messages_are_those_that_decoding_finds(
    messages: list[Any], is_ascii: bool, indent: int | None, spans: list[tuple[int, int, bytes]]
) -> None:
    raw = changed(written(messages, is_ascii, indent), spans)
    expected, got = decoded(raw), found(raw)
    assert (expected is None) is (got is None)
    assert list(map(shown, got or [])) == list(map(shown, expected or []))


@given(st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXTS}), min_size=1, max_size=5), st.booleans())
def test_plain_messages_are_left_out_where_they_weigh_more(said: list[Any], is_ascii: bool) -> None:
    raw = written(said, is_ascii, None)
    told, weighs = plane.messages(raw), plane.bones(raw)[2]
    assert told is not None
    if not told[1]:
        found = plane.messages_at(b"[" + raw + b"behind", 1, weighs + 1, None)
        assert found is not None and found[2] == 1 + len(raw)
        assert abs(found[3] - weighs) <= 1
        assert plane.messages_at(raw, 0, weighs - 2, None) is None


@given(
    st.dictionaries(TEXTS, VALUES, max_size=5), st.booleans(), st.sampled_from([None, 1]), st.lists(SPANS, max_size=2)
)
def test_members_are_those_that_decoding_finds(
    members: dict[str, Any], is_ascii: bool, indent: int | None, spans: list[tuple[int, int, bytes]]
) -> None:
    body = changed(written({**members, "last": LONG}, is_ascii, indent), spans)
    try:
        expected = {name: bytes(raw) for name, raw in msgspec.json.decode(body, type=FIELDS).items()}
    except (msgspec.DecodeError, UnicodeDecodeError):
        expected = None
    try:
        fields = located(body, None)
    except msgspec.DecodeError:
        assert expected is None
        return
    if fields is None:  # it has to be decoded
        return
    assert {name: bytes(raw) for name, raw in fields.items()} == expected
    assert fields.places is not None and fields.places.keys() == fields.keys()
    for name, (start, end) in fields.places.items():
        assert body[start:end].startswith(b'"%b"' % name.encode()) and body[start:end].endswith(bytes(fields[name]))


@given(
    st.dictionaries(TEXTS, VALUES, max_size=5), st.booleans(), st.sampled_from([None, 1]), st.lists(SPANS, max_size=2)
)
def test_one_member_is_found_where_all_are(
    members: dict[str, Any], is_ascii: bool, indent: int | None, spans: list[tuple[int, int, bytes]]
) -> None:
    whole = changed(written({**members, "wanted": [1], "last": {}}, is_ascii, indent), spans)
    for end in range(len(whole) + 1):
        body = whole[:end]
        start, all_of_them = plane.value_start(body, b"wanted"), plane.members(body)
        if all_of_them is not None:
            assert start == next((begins for name, _, begins, _ in all_of_them if name == "wanted"), None)
        elif start is not None:
            assert plane.members(body[:start] + b"1}") is not None


PLAIN = b'{"role": "user", "content": "hi"}'


@pytest.mark.parametrize(
    ("raw", "is_plain"),
    [
        (PLAIN, True),
        (b'{"content":"hi","role":"tool","name":"n","tool_call_id":"c"}', True),
        (b'{"role":"user","content":"\\u00e9\\ud83d\\ude00\\n\\"\\\\\\/"}', True),
        ('{"role":"user","content":"é😀"}'.encode(), True),
        (b'{"role":"assistant","content":"hi","tool_calls":null,"refusal":null}', True),
        (b'{"role":"user","content":""}', True),
        (b'{"role":"user","content":null}', False),
        (b'{"role":"user","content":"a","content":"b"}', False),
        (b'{"role":"user","content":"a","name":"b","name":null}', False),
        (b'{"role":"us\\u0065r","content":"hi"}', False),
        (b'{"rol\\u0065":"user","content":"hi"}', False),
        ('{"role":"rôle","content":"hi"}'.encode(), False),
        (b'{"role":"assistant","content":"hi","tool_calls":[]}', False),
        (b'{"role":"assistant","content":"hi","refusal":"no"}', False),
        (b'{"role":"user","content":[{"type":"text","text":"hi"}]}', True),
        (b'{"content": [ {"text": "h\\ni" , "type": "input_text"} ] , "role": "user"}', True),
        (
            b'{"role":"user","content":[{"type":"text","text":"a","cache_control":{"type":"ephemeral","ttl":"5m"}}]}',
            True,
        ),
        (b'{"role":"user","content":[{"type":"text","text":"a","cache_control":{"type":1}}]}', False),
        (b'{"role":"user","content":[{"type":"text","text":"a","cache_control":{"typ\\u0065":"a"}}]}', False),
        (b'{"role":"user","content":[{"type":"text","text":"a","cache_control":{"type":"\\u0061"}}]}', False),
        (b'{"role":"user","content":[{"type":"text","text":"a","cache_control":null}]}', False),
        (b'{"role":"user","content":[{"type":"text","text":"a","uuid":null}]}', False),
        (b'{"role":"user","content":[{"type":"text","text":"a","text":"b"}]}', False),
        (b'{"role":"user","content":[{"type":"text","type":"text","text":"b"}]}', False),
        (b'{"role":"user","content":[{"type":"image","text":"b"}]}', False),
        (b'{"role":"user","content":[{"type":"text"}]}', False),
        (b'{"role":"user","content":[{"text":"b"}]}', False),
        (b'{"role":"user","content":[{"type":"text","text":"a"},"b"]}', False),
        (b'{"role":"user","content":[{"type":"text","text":"a"}],"content":"b"}', False),
        (b'{"role":"user","content":["a"]}', False),
        (b'{"role":"user","content":[]}', False),
    ],
)
def test_a_message_that_is_one_text_is_not_decoded(raw: bytes, is_plain: bool) -> None:
    told = plane.messages(b"[%b, %b ]" % (PLAIN, raw))
    assert told is not None
    parts, others = told
    assert isinstance(parts[0], plane.PlainMessage)
    if is_plain:
        assert isinstance(parts[1], plane.PlainMessage) and others == []
    else:
        assert isinstance(parts[1], plane.FoundMessage) and others == [1]
        assert (bytes(parts[1].raw), parts[1].digest, parts[1].unit) == (raw, None, None)
    expected = MESSAGES.decode(b"[%b]" % raw)
    assert list(map(shown, found(b"[%b]" % raw) or [])) == list(map(shown, expected))


@pytest.mark.parametrize("value", [b'"\\x"', b'"\x01"', b'"', b"{}}"])
def test_what_nobody_reads_of_a_text_must_be_json_all_the_same(value: bytes) -> None:
    said = b'[{"role":"user","content":[{"type":"text","text":"a","cache_control":{"type":%b}}]}]'
    assert found(said % b'"a"') is not None
    assert found(said % value) is None


def test_a_message_keeps_the_body_that_its_text_lies_in() -> None:
    body = bytearray(b'[{"role":"user","content":"%b"},{"role":"user","content":"a\\nb"}]' % (b"x" * 5000))
    told = plane.messages(body)
    assert told is not None
    first, second = told[0]
    del told
    assert (first.size, second.size) == (5000, 3)
    assert (first.utf8, second.utf8, second.content) == (b"x" * 5000, b"a\nb", "a\nb")
    del first
    with pytest.raises(BufferError):
        body.clear()
    del second
    body.clear()
    other = plane.messages(memoryview(b'[{"role":"user","content":"one"}]'))
    assert other is not None and other[0][0].utf8 is other[0][0].utf8 == b"one"


def test_a_list_of_messages_begins_in_its_body() -> None:
    assert plane.messages_at(b"x[]x", 1, 9, None) == ([], [], 3, 2)
    for at in (0, 2, 4, 5, 10**9):
        assert plane.messages_at(b"x[]x", at, 9, None) is None
    with pytest.raises(ValueError, match="not at -1"):
        plane.messages_at(b"x[]x", -1, 9, None)


def test_messages_are_of_a_buffer() -> None:
    with pytest.raises(TypeError):
        plane.messages("[]")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    [
        *(b"\\x", b"\\", b"\\u12", b"\\u12g4", b"\\ud800", b"\\udc00", b"\\ud800\\u0041", b"a\nb", b"\x00", b"\xff"),
        *(b"\xc0\x80", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf0\x80\x80\x80", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80"),
        *(b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\x80", b"\xc3(", b"x" * 15 + b"\\", b"x" * 15 + b"\x1f"),
    ],
)
@pytest.mark.parametrize("beside", [b"", b"x" * 13, b"y" * 40])
def test_what_is_no_text_is_no_plain_message(content: bytes, beside: bytes) -> None:
    raw = b'[{"role":"user","content":"%b%b%b"}]' % (beside, content, beside)
    assert decoded(raw) is None
    assert found(raw) is None


@pytest.mark.parametrize(
    "one", [b'\\"', b"\\\\", b"\\u00e9", "é".encode(), b"\x1f", b"\\", b'"', b"\xff", b"{", b"\\\\" * 70]
)
def test_wherever_it_stands_in_a_long_text_nothing_is_overlooked(one: bytes) -> None:
    for place in range(200):
        for after in (0, 1, 70, 200):
            raw = b'[{"role":"user","content":"%b%b%b"}]' % (b"x" * place, one, b"y" * after)
            expected, told = decoded(raw), found(raw)
            assert (told and shown(told[0])) == (expected and shown(expected[0])), (place, after)


@pytest.mark.parametrize(
    "raw", [b"", b"[", b"[]", b" [ ] ", b"[] x", b"{}", b"null", b"[1]", b"[{}]", b"[{},]", b"[{}}]"]
)
def test_what_is_no_list_of_messages_is_told_as_before(raw: bytes) -> None:
    expected = decoded(raw)
    assert found(raw) == expected


def long(**members: object) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": LONG}], **members}).encode()


@pytest.mark.parametrize(
    "body",
    [
        long(),
        long(messages=[{"role": "user", "content": LONG + "é\n"}, {"role": "assistant", "content": None}]),
        long().replace(b'"model": "m"', b'"model": "m", "mod\\u0065l": "n"'),
        long().replace(b'"model": "m"', b'"model": "m", "model": "n"'),
        long(tools=[{"type": "function", "function": {"name": "f"}}], stream=True, max_tokens=4),
    ],
)
def test_a_long_body_is_the_request_that_decoding_makes(body: bytes) -> None:
    got = parse_request(Endpoint.CHAT, body, {}, RULES)
    expected = request_of(Endpoint.CHAT, Members(msgspec.json.decode(body, type=FIELDS), body), {}, RULES)
    chains = got.prompt.chain, expected.prompt.chain
    known = [(one.keys, one.ends, one.marks, [*map(kind_of, one.texts)], list(cuts_of(one))) for one in chains]
    assert known[0] == known[1]
    assert (got.model, got.stream) == (expected.model, expected.stream)
    assert {name: bytes(raw) for name, raw in got.fields.items()} == {
        name: bytes(raw) for name, raw in expected.fields.items()
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (long()[:-1], "the body is not a JSON object: Input data was truncated"),
        (long() + b"x", "the body is not a JSON object: JSON is malformed: trailing characters"),
        (long().replace(b'"m"', b"nul"), "the body is not a JSON object: JSON is malformed: invalid character"),
        (long().replace(b'"m"', b"tru}"), "the body is not a JSON object: JSON is malformed: invalid character"),
        (long().replace(b'"user"', b"user"), "the body is not a JSON object: JSON is malformed: invalid character"),
        (long().replace(b'"m"', b""), "the body is not a JSON object: JSON is malformed"),
        (long().replace(b"[{", b"[{}{"), "the body is not a JSON object: JSON is malformed"),
        (long(messages=[{"content": LONG}]), "messages: Object missing required field `role` - at `$[0]`"),
        (long(messages=[{"role": "user", "content": LONG + "\ud800"}]), "the body is not a JSON object"),
        (long(messages=[LONG]), "messages: Expected `object`, got `str` - at `$[0]`"),
        (long(messages=LONG), "messages: Expected `array`, got `str`"),
        (long(model=None), "model: is missing"),
    ],
)
def test_what_is_wrong_with_a_long_body_is_told_as_before(body: bytes, message: str) -> None:
    with pytest.raises(RequestError) as told:
        parse_request(Endpoint.CHAT, body, {}, RULES)
    assert told.value.message.startswith(message)


@pytest.mark.parametrize("endpoint", [Endpoint.RESPONSES, Endpoint.COMPLETIONS])
def test_messages_that_an_endpoint_does_not_read_are_json_all_the_same(endpoint: Endpoint) -> None:
    body = long(input="hi", prompt="hi").replace(b'"user"', b"user")
    with pytest.raises(RequestError, match="not a JSON object"):
        parse_request(endpoint, body, {}, RULES)
