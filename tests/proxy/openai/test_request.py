"""A body as a turn: what is read from it and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd.proxy.config import SessionKey
from ppd.proxy.errors import RequestError
from ppd.proxy.openai.request import Endpoint
from tests.support.requests import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PROMPT_MEMBER,
    RESPONSES,
    USER,
    assistant,
    image,
    label,
    parse,
    parse_bytes,
    text,
    user,
)

# -- what a request says


@pytest.mark.parametrize(
    ("endpoint", "members", "expected"),
    [
        (CHAT, {}, None),
        (CHAT, {"max_tokens": 10}, 10),
        (CHAT, {"max_tokens": 10, "max_completion_tokens": 7}, 7),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 7.0}, 7),
        (COMPLETIONS, {"max_tokens": 0}, 0),
        (RESPONSES, {"max_output_tokens": 5}, 5),
        (MESSAGES, {"max_tokens": 9}, 9),
    ],
)
def test_the_smallest_cap_counts(endpoint: Endpoint, members: dict[str, Any], expected: int | None) -> None:
    assert parse(endpoint, **members).max_output_tokens == expected


@pytest.mark.parametrize(
    ("endpoint", "members", "expected"),
    [
        (CHAT, {}, False),
        (CHAT, {"stream_options": None}, False),
        (CHAT, {"stream_options": {"include_usage": False}}, False),
        (CHAT, {"stream_options": {"include_usage": True, "other": 1}}, True),
        (RESPONSES, {}, True),
        (MESSAGES, {}, True),
    ],
)
def test_who_wants_usage(endpoint: Endpoint, members: dict[str, Any], expected: bool) -> None:
    assert parse(endpoint, **members).wants_usage is expected


@pytest.mark.parametrize(
    ("endpoint", "members", "reason", "choices"),
    [
        (CHAT, {}, None, 1),
        (CHAT, {"n": 1, "best_of": 1, "use_beam_search": False, "prompt_logprobs": None, "echo": False}, None, 1),
        (CHAT, {"n": 3}, "n", 3),
        (CHAT, {"prompt_logprobs": 0}, "prompt_logprobs", 1),
        (CHAT, {"use_beam_search": True}, "beam_search", 1),
        (CHAT, {"echo": True}, "echo", 1),
        (COMPLETIONS, {"best_of": 2}, "best_of", 1),
        (COMPLETIONS, {"prompt": ["a", "b"]}, None, 2),
        (COMPLETIONS, {"prompt": [[1], [2]], "n": 2}, "n", 4),
        (COMPLETIONS, {"prompt": ["a"]}, None, 1),
        (COMPLETIONS, {"prompt": [[1, 2]]}, None, 1),
        (COMPLETIONS, {"prompt": None, "prompt_embeds": "AAAA"}, "prompt_embeds", 1),
        (CHAT, {"truncate_prompt_tokens": -1}, "truncation", 1),
        (CHAT, {"truncate_prompt_tokens": 100}, None, 1),
        (RESPONSES, {"truncation": "auto"}, "truncation", 1),
        (RESPONSES, {"truncation": None}, "truncation", 1),
        (RESPONSES, {"truncation": "disabled"}, None, 1),
        (RESPONSES, {"n": 3}, None, 1),
    ],
)
def test_what_needs_one_engine(endpoint: Endpoint, members: dict[str, Any], reason: str | None, choices: int) -> None:
    request = parse(endpoint, **members)
    assert (request.single_engine, request.choices) == (reason, choices)


@pytest.mark.parametrize(
    ("endpoint", "members", "tell"),
    [
        (CHAT, {}, True),
        (CHAT, {"prompt_logprobs": None, "echo": False, "truncate_prompt_tokens": None}, True),
        (CHAT, {"prompt_logprobs": 0}, False),
        (CHAT, {"prompt_logprobs": 1, "n": 2}, False),
        (CHAT, {"echo": True}, False),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, False),
        (CHAT, {"truncate_prompt_tokens": -1}, False),
        (CHAT, {"truncate_prompt_tokens": 100}, False),
        (RESPONSES, {"truncation": "auto"}, False),
        (RESPONSES, {"truncation": None}, False),
        (RESPONSES, {"truncation": "disabled"}, True),
        (RESPONSES, {"previous_response_id": "resp_1"}, False),
        (RESPONSES, {"previous_response_id": None}, True),
    ],
)
def test_whose_counts_tell_of_texts_and_caches(endpoint: Endpoint, members: dict[str, Any], tell: bool) -> None:
    assert parse(endpoint, **members).counts_tell is tell


@pytest.mark.parametrize(
    ("members", "others", "are_alike"),
    [
        ({"output_config": {"effort": "low"}}, {"output_config": {"effort": "high"}}, False),
        ({"output_config": {"effort": "low"}}, {}, False),
        ({"thinking": {"type": "disabled"}}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, False),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
            {"thinking": {"type": "disabled"}},
            True,
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"thinking": {"type": "adaptive"}}, True),
        ({"output_config": {"format": {"type": "json_schema"}}}, {"output_config": None, "thinking": None}, True),
    ],
)
def test_of_messages_the_effort_is_part_of_the_prompt(
    members: dict[str, Any], others: dict[str, Any], are_alike: bool
) -> None:
    """As vLLM gives it to the template, which may say it first; nothing else of these members."""
    one, other = (parse(MESSAGES, **said).prompt.chain.keys for said in (members, others))
    assert (one == other) is are_alike


@pytest.mark.parametrize(("member", "value"), [("thinking", "off"), ("output_config", {"effort": 3})])
def test_an_effort_that_cannot_be_read_is_refused_by_its_name(member: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{member}: ") as refused:
        parse(MESSAGES, **{member: value})
    assert refused.value.param == member


def test_members_are_kept_as_they_came() -> None:
    body = b'{"model":"m", "messages":[{"role":"user","content":"hi"}], "kv_transfer_params": { "a" : 1.0 }}'
    request = parse_bytes(body)
    assert bytes(request.fields["kv_transfer_params"]) == b'{ "a" : 1.0 }'
    assert list(request.fields) == ["model", "messages", "kv_transfer_params"]


def test_prompt_bytes_are_those_of_what_the_model_reads() -> None:
    plain = parse(CHAT, [user("x" * 1000)])
    assert 1000 < plain.prompt_bytes < 1050
    assert parse(CHAT, [user("x" * 1000)], metadata="y" * 5000).prompt_bytes == plain.prompt_bytes
    assert parse(CHAT, [user("x" * 1000)], tools=[{"name": "y" * 500}]).prompt_bytes > 1500
    big = user([text("x" * 1000), image("data:image/png;base64," + "A" * 900_000)])
    assert parse(CHAT, [big]).prompt_bytes < 6000
    assert parse(COMPLETIONS, "x" * 1000).prompt_bytes == 1000


# -- ids


@pytest.mark.parametrize(
    ("headers", "members", "expected"),
    [
        ({}, {}, None),
        ({"x-session-id": "a", "x-correlation-id": "c"}, {"session_id": "d"}, "a"),
        ({"x-session-affinity": "b", "x-correlation-id": "c"}, {}, "b"),
        ({"x-correlation-id": "c"}, {"conversation_id": "d"}, "c"),
        ({"x-session-id": ""}, {"conversation_id": "d", "session_id": "e"}, "d"),
        ({}, {"conversation_id": None, "session_id": "e", "prompt_cache_key": "f"}, "e"),
        ({}, {"session_id": "", "prompt_cache_key": "f"}, "f"),
        ({}, {"session_id": 17}, "17"),
        ({}, {"metadata": {"session_id": "x"}, "user": "y"}, None),
        ({}, {"conversation": "only responses has it"}, None),
    ],
)
def test_explicit_ids_in_their_order(headers: dict[str, str], members: dict[str, Any], expected: str | None) -> None:
    body = json.dumps({"model": "m", "messages": [USER], **members}).encode()
    assert parse_bytes(body, headers=headers).prompt.label == label(expected)


@pytest.mark.parametrize("conversation", ["conv_1", {"id": "conv_1"}])
def test_a_responses_conversation_is_an_id(conversation: Any) -> None:
    assert parse(RESPONSES, conversation=conversation).prompt.label == label("conv_1", RESPONSES)


def test_ids_mean_something_only_to_one_tenant_model_and_endpoint() -> None:
    def labelled(tenant: str, model: str, endpoint: Endpoint, id: str) -> int | None:
        body = json.dumps({"model": model, "messages": [USER]}).encode()
        return parse_bytes(body, endpoint, {"x-session-id": id}, tenant).prompt.label

    labels = {
        labelled("t", "m", CHAT, "1"),
        labelled("u", "m", CHAT, "1"),
        labelled("t", "n", CHAT, "1"),
        labelled("t", "m", MESSAGES, "1"),
        labelled("t", "m", CHAT, "2"),
    }
    assert len(labels) == 5
    assert labelled("t", "m", CHAT, "1") in labels


@pytest.mark.parametrize(
    ("endpoint", "prompt", "opener"),
    [
        (CHAT, [{"role": "system", "content": "s"}, USER, user("later")], "49f68a5c8493ec2c0bf489821c21fc3b"),
        (CHAT, [user([text("hi"), image("u")])], "49f68a5c8493ec2c0bf489821c21fc3b"),
        (MESSAGES, [USER], "49f68a5c8493ec2c0bf489821c21fc3b"),
        (RESPONSES, "hi", "49f68a5c8493ec2c0bf489821c21fc3b"),
        (RESPONSES, [user([{"type": "input_text", "text": "hi"}])], "49f68a5c8493ec2c0bf489821c21fc3b"),
        (CHAT, [assistant("hello")], None),
        (COMPLETIONS, "hi", None),
    ],
)
def test_the_papers_key_is_the_md5_of_the_first_user_message(
    endpoint: Endpoint, prompt: Any, opener: str | None
) -> None:
    body = json.dumps({"model": "m", PROMPT_MEMBER[endpoint]: prompt}).encode()
    assert parse_bytes(body, endpoint, session_key=SessionKey.FIRST_USER_MESSAGE).prompt.opener == opener
    assert parse_bytes(body, endpoint).prompt.opener is None


# -- what is refused


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (CHAT, b"", None),
        (CHAT, b"{", None),
        (CHAT, b"[]", None),
        (CHAT, b"null", None),
        (CHAT, b'{"model":"m","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        (CHAT, b'{"model":"m","tools":' + b"[" * 60 + b"]" * 60 + b',"messages":[]}', "messages"),
        (CHAT, b'{"messages":[{"role":"user"}]}', "model"),
        (CHAT, b'{"model":5,"messages":[{"role":"user"}]}', "model"),
        (CHAT, b'{"model":"","messages":[{"role":"user"}]}', "model"),
        (CHAT, b'{"model":"m"}', "messages"),
        (CHAT, b'{"model":"m","messages":null}', "messages"),
        (CHAT, b'{"model":"m","messages":[]}', "messages"),
        (CHAT, b'{"model":"m","messages":{}}', "messages"),
        (CHAT, b'{"model":"m","messages":["hi"]}', "messages"),
        (CHAT, b'{"model":"m","messages":[{"content":"hi"}]}', "messages"),
        (CHAT, b'{"model":"m","messages":[{"role":"user","content":5}]}', "messages"),
        (CHAT, b'{"model":"m","messages":[{"role":"user","content":[5]}]}', "messages"),
        (CHAT, b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}', "messages"),
        (CHAT, b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}', None),
        (CHAT, b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":5}]}]}', "text"),
        (CHAT, b'{"model":"m","messages":[{"role":"a","tool_calls":[{"id":5}]}]}', "messages"),
        (CHAT, b'{"model":"m","messages":[{"role":"user"}],"stream":"yes"}', "stream"),
        (CHAT, b'{"model":"m","messages":[{"role":"user"}],"n":0}', "n"),
        (CHAT, b'{"model":"m","messages":[{"role":"user"}],"n":true}', "n"),
        (CHAT, b'{"model":"m","messages":[{"role":"user"}],"max_tokens":-1}', "max_tokens"),
        (CHAT, b'{"model":"m","messages":[{"role":"user"}],"max_tokens":1.5}', "max_tokens"),
        (CHAT, b'{"model":"m","messages":[{"role":"user"}],"max_tokens":1e999}', "max_tokens"),
        (CHAT, b'{"model":"m","messages":[{"role":"user"}],"stream_options":[]}', "stream_options"),
        (CHAT, b'{"model":"m","messages":[{"role":"user"}],"session_id":{}}', "session_id"),
        (CHAT, b'{"model":"m","messages":[{"role":"user"}],"cache_salt":1}', "cache_salt"),
        (COMPLETIONS, b'{"model":"m"}', "prompt"),
        (COMPLETIONS, b'{"model":"m","prompt":[]}', "prompt"),
        (COMPLETIONS, b'{"model":"m","prompt":[[]]}', "prompt"),
        (COMPLETIONS, b'{"model":"m","prompt":[1,"a"]}', "prompt"),
        (COMPLETIONS, b'{"model":"m","prompt":["a",1]}', "prompt"),
        (COMPLETIONS, b'{"model":"m","prompt":[-1]}', "prompt"),
        (COMPLETIONS, b'{"model":"m","prompt":[99999999999999999999999]}', "prompt"),
        (COMPLETIONS, b'{"model":"m","prompt":{}}', "prompt"),
        (RESPONSES, b'{"model":"m"}', "input"),
        (RESPONSES, b'{"model":"m","input":[]}', "input"),
        (RESPONSES, b'{"model":"m","input":5}', "input"),
        (RESPONSES, b'{"model":"m","input":"hi","previous_response_id":7}', "previous_response_id"),
        (RESPONSES, b'{"model":"m","input":"hi","conversation":{}}', "conversation"),
        (RESPONSES, b'{"model":"m","input":"hi","instructions":7}', "instructions"),
        (MESSAGES, b'{"model":"m","messages":[{"role":"user"}],"system":7}', "system"),
    ],
)
def test_a_body_that_is_no_turn_is_refused_with_the_member_named(
    endpoint: Endpoint, body: bytes, param: str | None
) -> None:
    with pytest.raises(RequestError) as caught:
        parse_bytes(body, endpoint)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("size", [3, 16, 5000, 100_000])
def test_without_its_prompt_a_request_ends_where_it_did(size: int) -> None:
    request = parse(COMPLETIONS, "x" * size)
    spent = request.without_prompt()
    assert (spent.prompt.chain.size, spent.prompt.chain.end()) == (
        request.prompt.chain.size,
        request.prompt.chain.end(),
    ) and spent.prompt.chain.size == size
    assert (spent.fields, spent.prompt.chain.data) == ({}, b"") and len(spent.prompt.chain.tail) <= max(16, size // 64)


def test_a_refusal_does_not_repeat_the_prompt() -> None:
    with pytest.raises(RequestError) as caught:
        parse(CHAT, [user("a secret"), {"role": ["another secret"]}])
    assert "secret" not in caught.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)
READ = (
    "messages prompt input system instructions tools stream stream_options n best_of echo use_beam_search max_tokens "
    "prompt_logprobs prompt_embeds cache_salt session_id conversation previous_response_id chat_template_kwargs "
    "documents reasoning continue_final_message"
).split()
PART = st.dictionaries(
    st.sampled_from(
        "type text image_url id name input tool_use_id content is_error output call_id arguments role".split()
    ),
    JSON | st.sampled_from(["text", "tool_use", "tool_result", "image_url", "function_call", "function_call_output"]),
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.text(max_size=5)}, optional={"content": JSON | st.lists(PART), "name": JSON}
)


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", Endpoint)
@given(data=st.data())
@settings(max_examples=settings().max_examples // 2)
def test_any_json_gives_a_request_or_a_request_error(endpoint: Endpoint, data: st.DataObject) -> None:
    session_key = data.draw(st.sampled_from(SessionKey))
    prompt = data.draw(st.lists(MESSAGE, min_size=1) | st.lists(PART, min_size=1) | JSON)
    body = data.draw(st.dictionaries(st.sampled_from(READ), JSON)) | {"model": "m", PROMPT_MEMBER[endpoint]: prompt}
    try:
        request = parse_bytes(msgspec.json.encode(body), endpoint, session_key=session_key)
    except RequestError as exc:
        assert exc.status == 400
    else:
        assert len(request.prompt.chain.keys) == len(request.prompt.chain.ends) > 0
        assert request.prompt_bytes >= 0


@given(st.binary())
def test_any_bytes_give_a_request_error(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_bytes(body)
