from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd.proxy.connectors.leg import answering_fields, plain_leg
from ppd.proxy.connectors.prefill import prefill_fields
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.openai.body_members import SHORT_BYTES, Fields, Members, spliced
from ppd.proxy.openai.request import Endpoint

P = Worker(role=Role.PREFILL, address="p:1")
LONG = b'"' + b"x" * SHORT_BYTES + b'"'
NEW = msgspec.Raw(b'{"new":[1]}')


def read(body: bytes) -> Members:
    return Members(msgspec.json.decode(body, type=Fields), body)


def is_forwarded(body: bytes) -> bool:
    """Whether the untouched members go on as the very body that came."""
    members = read(body)
    parts = spliced(dict(members), members)
    assert json.loads(b"".join(parts)) == json.loads(body)
    return parts[0] is body


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":%s}',
        b'{"a":1,"b":%s,"c":[{}]}',
        b' \n{ "a" :\t1 , "b" : %s\r\n, "c" : { "a" : [ "}" ] } } \n',
        '{"ä€😀":1e400,"":null,"b":%s,"z":-0.0}'.encode(),
        b'{"1":12,"2":%s,"3":"\\"","4":"\\\\"}',
    ],
)
def test_a_body_that_can_be_read_one_way_goes_on_as_it_came(body: bytes) -> None:
    assert is_forwarded(body % LONG)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1,"b":%s,"a":2}',
        b'{"a":1,"b":%s,"a":1}',
        b'{"a":1,"a":1,"b":%s}',
        b'{"a":1,"\\u0061":2,"b":%s}',
        b'{"\\u0061":1,"b":%s}',
        b'{"a":12,"b":%s,"a":1}',
        b'{"a":1,"b":%s,"a":1,"b":[1]}',
        b'{"a\\"":1,"b":%s}',
        b'{"a":{"x":0,"b":5},"b":42,"c":%s,"a":{"x":0,"b":5},"b":5}',
    ],
)
def test_a_body_that_could_be_read_otherwise_is_written_anew(body: bytes) -> None:
    assert not is_forwarded(body % LONG)


def test_a_value_that_looks_like_the_members_behind_it_is_no_way_around() -> None:
    # The last "a" is as long as all from the first one to the "b" inside of it: by lengths alone these are two members.
    last = b'{"x":%s,"b":' % LONG + b" " * 6 + b"5}"
    body = b'{"a":1,"b":42,"a":' + last + b"}"
    found = read(body)
    assert (bytes(found["a"]), bytes(found["b"])) == (last, b"42")
    assert not is_forwarded(body)


def test_short_bodies_and_those_of_very_many_members_are_written_anew() -> None:
    many = {str(number): "x" * 100 for number in range(300)}
    assert not is_forwarded(b'{ "a":1}')
    assert not is_forwarded(json.dumps(many).encode())
    assert not is_forwarded(b"{}")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ({}, b'{"a":1, "b":%s ,"c":3}'),
        ({"a": None}, b'{"b":%s ,"c":3}'),
        ({"b": None}, b'{"a":1,"c":3}'),
        ({"c": None}, b'{"a":1, "b":%s}'),
        ({"a": NEW}, b'{"b":%s ,"c":3,"a":{"new":[1]}}'),
        ({"b": NEW, "d": NEW}, b'{"a":1,"c":3,"b":{"new":[1]},"d":{"new":[1]}}'),
        ({"d": NEW}, b'{"a":1, "b":%s ,"c":3,"d":{"new":[1]}}'),
        ({"a": None, "b": None, "c": None}, b"{}"),
        ({"a": None, "b": None, "c": None, "d": NEW}, b'{"d":{"new":[1]}}'),
    ],
)
def test_members_are_put_in_replaced_and_left_out(edit: Mapping[str, msgspec.Raw | None], expected: bytes) -> None:
    body = b'{"a":1, "b":%s ,"c":3} ' % LONG
    members = read(body)
    fields = {name: value for name, value in {**members, **edit}.items() if value is not None}
    expected = expected.replace(b"%s", LONG) if edit else body
    assert b"".join(spliced(fields, members)) == expected


def test_what_stays_is_not_copied() -> None:
    body = b'{"messages":%s,"stream":true}' % LONG
    leg = plain_leg(Endpoint.CHAT, read(body), "id")
    assert any(isinstance(part, memoryview) and part.obj is body and part.nbytes > len(LONG) for part in leg.parts)
    whole = plain_leg(Endpoint.MESSAGES, read(body), "id")
    assert whole.body is body


# -- any body: the leg says what the members, written anew, would have said

NAMES = st.sampled_from(
    "model messages stream stream_options max_tokens n stop kv_transfer_params vllm_xargs tools é 世 a".split()
) | st.text(max_size=3)
SPACE = st.text(alphabet=" \t\r\n", max_size=2)
NUMBERS = st.sampled_from(["1e400", "-0", "1E+2", "9" * 400, "0.10", "12", "1"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def written(draw: st.DrawFn, value: Any) -> str:
    """JSON of a value as somebody may write it."""
    indent, is_ascii = draw(st.sampled_from([None, 0, 1])), draw(st.booleans())
    return json.dumps(value, indent=indent, ensure_ascii=is_ascii)


@st.composite
def named(draw: st.DrawFn) -> str:
    name: str = draw(NAMES)
    if draw(st.integers(0, 9)) == 0:
        return '"' + "".join(f"\\u{unit:04x}" for unit in _units(name)) + '"'
    return draw(written(name))


def _units(name: str) -> list[int]:
    data = name.encode("utf-16-le")
    return [int.from_bytes(data[at : at + 2], "little") for at in range(0, len(data), 2)]


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Objects with every oddity of JSON at their top level, long enough to be spliced."""
    space: st.SearchStrategy[str] = SPACE if draw(st.booleans()) else st.just("")
    values: st.SearchStrategy[str] = VALUES.flatmap(written) | NUMBERS
    members: list[tuple[str, str]] = draw(st.lists(st.tuples(named(), values), max_size=8))
    if draw(st.booleans()) and members:
        members += [draw(st.sampled_from(members))]  # twice, and with the same value
    members.insert(draw(st.integers(0, len(members))), ('"long"', LONG.decode()))
    gaps = [draw(space) for _ in range(4)]
    text = ",".join(f"{gaps[0]}{name}{gaps[1]}:{gaps[2]}{value}{gaps[3]}" for name, value in members)
    return f"{{{text}}}".encode("utf-8", "surrogatepass")


@pytest.mark.slow
@given(body=bodies(), endpoint=st.sampled_from(Endpoint))
@settings(max_examples=200)
def test_a_leg_says_what_it_would_say_written_anew(body: bytes, endpoint: Endpoint) -> None:
    try:
        members = read(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    for fields in (answering_fields(endpoint, members), prefill_fields(endpoint, members, P), dict(members)):
        anew = msgspec.json.encode(fields)
        sent = b"".join(spliced(fields, members))
        pairs = json.loads(sent, object_pairs_hook=list)
        assert json.loads(sent) == json.loads(anew)
        assert sorted(name for name, _ in pairs) == sorted(fields), "no name is there twice"
        assert msgspec.json.decode(sent, type=Fields) == fields, "each value is the same bytes"
