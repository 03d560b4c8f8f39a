"""Bodies that no client library would write, through the parser and through a running proxy."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd.proxy.config import SessionKey
from ppd.proxy.errors import RequestError, error_body
from ppd.proxy.openai.request import Endpoint
from tests.support.proxy_thread import Target
from tests.support.raw_http import Answer, error_of, exchange_all, post
from tests.support.requests import parse_bytes

SECRET = "Chrysanthemum"  # stands for a prompt's text: no message repeats it
BODIES: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: {
        "messages": [
            {"role": "system", "content": SECRET},
            {"role": "user", "content": [{"type": "text", "text": SECRET}], "name": "n"},
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a":1}'}}]},
            {"role": "tool", "tool_call_id": "c", "content": SECRET},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "stream_options": {"include_usage": True},
        "n": 1,
    },
    Endpoint.COMPLETIONS: {"prompt": [SECRET, SECRET], "best_of": 1, "echo": False, "suffix": SECRET},
    Endpoint.RESPONSES: {
        "input": [
            {"type": "message", "role": "user", "content": SECRET},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": SECRET},
            {"type": "reasoning", "summary": []},
        ],
        "instructions": SECRET,
        "conversation": {"id": "c"},
    },
    Endpoint.MESSAGES: {
        "system": [{"type": "text", "text": SECRET}],
        "messages": [
            {"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": SECRET}}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": SECRET}]},
        ],
    },
}
COMMON: dict[str, Any] = {"model": "sim", "max_tokens": 2, "session_id": "s", "stream": False, "cache_salt": "x"}


def text_of(endpoint: Endpoint) -> str:
    return json.dumps({**COMMON, **BODIES[endpoint]})


# Text that stands where a JSON value should: no encoder writes most of it.
_WORDS = r"""null true -0 1e400 -1e400 1E+2 0.1e-400 01 +1 .5 5. NaN Infinity -Infinity 1e 0x1 '' undefined /**/1
    \u0000 "\ud800" "\udc00\ud800" "\u0000" "\x41" "\" ["] {}} [1,] {,} {"a":1,} [[]] {"a":{"a":{"a":[]}}} [null]"""
_LONG = ["9" * 30, "-" + "9" * 400, "9" * 5000, "0." + "1" * 400, '"' + "x" * 3000 + '"', "[" * 70 + "]" * 70, "\xa01"]
LITERALS = st.sampled_from([*_WORDS.split(), *_LONG])


def damaged(endpoint: Endpoint, data: st.DataObject) -> bytes:
    """A valid body after one or a few blows."""
    body = text_of(endpoint)
    marks = [at for at, char in enumerate(body) if char in '{}[]:,"']
    raw = body.encode()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from(marks)) % (len(raw) + 1)
        cut = data.draw(st.integers(0, 12))
        put = data.draw(LITERALS.map(str.encode) | st.binary(max_size=4) | st.just(raw[at : at + 30]))
        raw = raw[:at] + put + raw[at + cut :]
    return raw


def with_member(endpoint: Endpoint, path: tuple[Any, ...], literal: str) -> bytes:
    """A valid body with another value at a member's place, or a second member under its name."""
    body: Any = json.loads(text_of(endpoint))
    inner = body
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = "@@"
    return json.dumps(body).replace('"@@"', literal).encode("utf-8", "replace")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return ([path] if path else []) + [place for key, member in inner for place in places(member, (*path, key))]


def parsed(endpoint: Endpoint, body: bytes, session_key: SessionKey = SessionKey.PREFIX) -> None:
    """A request or a refusal that could be sent."""
    try:
        request = parse_bytes(body, endpoint, session_key=session_key)
    except RequestError as exc:
        assert exc.status == 400
        assert len(exc.message) < 1000 and SECRET not in exc.message
        error_of(error_body(exc.message, exc.kind, exc.code, exc.param))
    else:
        assert 0 < len(request.prompt.chain.keys) == len(request.prompt.chain.ends)
        assert request.choices >= 1 and request.prompt_bytes >= 0


@pytest.mark.parametrize("endpoint", Endpoint)
def test_the_bodies_that_are_damaged_here_are_whole(endpoint: Endpoint) -> None:
    parse_bytes(text_of(endpoint).encode(), endpoint)


@pytest.mark.parametrize("endpoint", Endpoint)
@given(data=st.data(), session_key=st.sampled_from(SessionKey))
@settings(max_examples=200)
def test_a_damaged_body_is_a_request_or_refused(
    endpoint: Endpoint, data: st.DataObject, session_key: SessionKey
) -> None:
    parsed(endpoint, damaged(endpoint, data), session_key)


@pytest.mark.parametrize("endpoint", Endpoint)
@given(literal=LITERALS, session_key=st.sampled_from(SessionKey))
@settings(max_examples=60)
def test_any_text_in_any_place_is_a_request_or_refused(
    endpoint: Endpoint, literal: str, session_key: SessionKey
) -> None:
    for path in places(json.loads(text_of(endpoint))):
        parsed(endpoint, with_member(endpoint, path, literal), session_key)


def test_of_a_member_that_is_there_twice_the_last_counts_and_goes_on_alone() -> None:
    body = b'{"model":"a","model":"m","messages":5,"messages":[{"role":"user","content":"x"}],"n":0,"n":2}'
    request = parse_bytes(body)
    assert (request.model, request.choices, [*request.fields]) == ("m", 2, ["model", "messages", "n"])


# -- through a running proxy


@pytest.fixture(scope="module")
def target(start_target: Callable[..., Target]) -> Target:
    return start_target("D1")


def judged(target: Target, payloads: list[bytes]) -> list[Answer]:
    """Answers, or refusals in a shape that clients parse; nothing else, and no trace of a failure."""
    found = []
    for payload, heard in zip(payloads, exchange_all(target.port, payloads, quiet_s=20), strict=True):
        (answer,) = heard.answers
        assert answer.status == 200 or 400 <= answer.status < 500, (payload, answer)
        if answer.status != 200:
            error = json.loads(answer.body)["error"]
            assert error["message"] and error["type"]
        found.append(answer)
    target.alarms.check()
    return found


@pytest.mark.parametrize("endpoint", Endpoint)
@given(data=st.data())
@settings(max_examples=25)
def test_a_damaged_body_is_answered_or_refused(target: Target, endpoint: Endpoint, data: st.DataObject) -> None:
    judged(target, [post(endpoint.value, damaged(endpoint, data)) for _ in range(4)])


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize("stream", [False, True])
@given(literals=st.lists(LITERALS, min_size=4, max_size=4), data=st.data())
@settings(max_examples=25)
def test_any_text_in_any_place_is_answered_or_refused(
    target: Target, endpoint: Endpoint, stream: bool, literals: list[str], data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(places(json.loads(text_of(endpoint)))))
    bodies = [with_member(endpoint, path, literal) for literal in literals]
    asked = b'"stream": %s' % (b"true" if stream else b"false")
    judged(target, [post(endpoint.value, body.replace(b'"stream": false', asked)) for body in bodies])


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize("literal", ["9" * 400, "1e308", "18446744073709551616", "-1", "0", "1.5", "true"])
def test_no_number_is_too_large(target: Target, endpoint: Endpoint, literal: str) -> None:
    names = (
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "n",
        "best_of",
        "priority",
        "seed",
        "session_id",
    )
    judged(target, [post(endpoint.value, with_member(endpoint, (name,), literal)) for name in names])


def test_a_nest_is_refused_with_the_limit_and_reaches_no_engine(target: Target) -> None:
    target.received()
    nest = "[" * 70 + "]" * 70
    for endpoint in Endpoint:
        (answer,) = judged(target, [post(endpoint.value, with_member(endpoint, ("metadata",), nest))])
        assert answer.status == 400 and "64 levels" in error_of(answer.body)["message"]
    assert target.received() == []


ADMIN = st.sampled_from(["/admin/weights", "/admin/workers", "/admin/workers/D1"])
SETTINGS = st.dictionaries(
    st.sampled_from("mode x table w_ttft w_tpot lookup uncovered worker draining".split()) | st.text(max_size=5),
    LITERALS | st.sampled_from(['"table"', '"/"', '"\\u0000"', '"D=a:1,zmq_address=\\u0000"', '"' + "a/" * 3000 + '"']),
    max_size=3,
).map(lambda members: "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in members.items()) + "}")


@given(calls=st.lists(st.tuples(ADMIN, SETTINGS.map(str.encode) | st.binary(max_size=20)), min_size=4, max_size=4))
@settings(max_examples=60)
def test_whatever_the_operator_sends_is_taken_or_refused(target: Target, calls: list[tuple[str, bytes]]) -> None:
    methods = {"/admin/weights": b"PUT", "/admin/workers": b"POST", "/admin/workers/D1": b"PATCH"}
    payloads = [post(path, body, b"X-Admin-Key: operator\r\n", methods[path]) for path, body in calls]
    for payload, heard in zip(payloads, exchange_all(target.port, payloads, quiet_s=20), strict=True):
        (answer,) = heard.answers
        assert answer.status in (200, 201, 400), (payload, answer)
        assert answer.status != 400 or error_of(answer.body)
    target.alarms.check()


@pytest.mark.parametrize(
    "table", ["\0", "/", "/etc/passwd", ".", "..", "a" * 5000, "/dev/zero", "\ud7ff", "~", "/proc/self/mem", "x\n"]
)
def test_a_table_that_cannot_be_read_is_refused(target: Target, table: str) -> None:
    body = json.dumps({"mode": "table", "table": table}).encode()
    (answer,) = judged(target, [post("/admin/weights", body, b"X-Admin-Key: operator\r\n", b"PUT")])
    assert answer.status == 400
    assert "root:" not in error_of(answer.body)["message"]
