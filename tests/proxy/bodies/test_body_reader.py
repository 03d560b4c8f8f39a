"""A large body, read by the helper process, makes the request that it would have made in the proxy's own."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import asdict

from ppd.proxy import plane
from ppd.proxy.admission.keys import Client
from ppd.proxy.admission.tenant_scope import TenantScope
from ppd.proxy.bodies.body_reader import BodyReader
from ppd.proxy.bodies.body_worker import TASKS, ReadAnswer
from ppd.proxy.bodies.named_media import with_named_media
from ppd.proxy.bodies.shared_bytes import LARGE_BYTES, SharedBytes
from ppd.proxy.config import ProxyConfig, SessionKey
from ppd.proxy.connectors.leg import plain_leg
from ppd.proxy.errors import RequestError
from ppd.proxy.openai.answer import AnswerObserver
from ppd.proxy.openai.prompt_list import prompt_list
from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Endpoint, ReadingRules, Request, parse_request
from ppd.proxy.sessions.templates import NO_TEMPLATES, Templates
from ppd.proxy.sessions.text_cuts import cuts_of
from ppd.proxy.sessions.text_kinds import kind_of
from tests.support.requests import CHAT, COMPLETIONS, HASHER, MESSAGES, RESPONSES, USER

HEADERS = {"x-session-id": "ann"}
LONG = 'a "word", [another]\n' * 3000
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"required": ["a", "b"]}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBO" * 20_000}}


SYSTEM = {"role": "system", "content": "be brief"}
ROUND = [
    {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "4"},
]
ANYBODY = Client(name="", tenant="t")
TENANT = Client(name="k", tenant="t", scope=TenantScope(b"c" * 32, b"i" * 32))
ALIASES = {"m": "another name"}


class InThisProcess:
    """The helper's tasks, done here."""

    async def ask(self, name: str, arguments: bytes, shared: SharedBytes) -> tuple[bytes, SharedBytes | None]:
        result, new = TASKS[name](arguments, shared.view())
        return result, None if new is None else SharedBytes.of([new])

    async def close(self) -> None: ...


def reader(**settings: Any) -> BodyReader:
    return BodyReader(ProxyConfig(**settings), HASHER, lambda: ALIASES, InThisProcess())


def here(endpoint: Endpoint, body: bytes, client: Client, session_key: SessionKey = SessionKey.PREFIX) -> Request:
    request = parse_request(
        endpoint,
        body,
        HEADERS,
        ReadingRules(
            tenant=client.tenant,
            hasher=HASHER,
            session_key=session_key,
            salted=None if client.scope is None else client.scope.salt,
            aliases=ALIASES,
        ),
    )
    return with_named_media(request, client.tenant, 9) if request.has_media else request


def shown(request: Request) -> dict[str, Any]:
    """What of a request can be compared."""
    chain = request.prompt.chain
    values = asdict(request) | asdict(request.prompt)
    for name in ("fields", "prompt", "chain", "prompts"):
        values.pop(name)
    members = {name: bytes(value) for name, value in request.fields.items()}
    return {
        **values,
        "members": members,
        "keys": chain.keys,
        "ends": chain.ends,
        "cuts": list(cuts_of(chain)),
        "kinds": tuple(map(kind_of, chain.texts)),
        "marks": chain.marks,
        "tail": chain.tail,
        "end": chain.end(),
    }


BODIES: list[tuple[Endpoint, dict[str, Any]]] = [
    (CHAT, {"messages": [USER, {"role": "assistant", "content": LONG}, USER], "stream": True, "tools": [TOOL]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}, IMAGE]}], "n": 2, "user": "é"}),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": LONG}], "continue_final_message": True}),
    (CHAT, {"messages": [SYSTEM, USER, *ROUND, {"role": "assistant", "content": LONG}], "tools": [TOOL, TOOL]}),
    (CHAT, {"messages": [{"role": "assistant", "content": "so"}], "continue_final_message": True}),
    (CHAT, {"messages": [USER], "prompt_cache_key": "k", "priority": 3, "logit_bias": {"1": 2}}),
    (COMPLETIONS, {"prompt": LONG}),
    (COMPLETIONS, {"prompt": [LONG]}),
    (COMPLETIONS, {"prompt": list(range(5000))}),
    (COMPLETIONS, {"prompt": ["a", LONG, "a"], "n": 2}),
    (COMPLETIONS, {"prompt": [[1, 2], [1, 2], [3]]}),
    (RESPONSES, {"input": LONG, "instructions": "be brief", "previous_response_id": "r"}),
    (MESSAGES, {"system": LONG, "messages": [USER], "max_tokens": 9, "tools": [TOOL]}),
]


@pytest.mark.parametrize("client", [ANYBODY, TENANT], ids=["anybody", "a tenant"])
@pytest.mark.parametrize("session_key", SessionKey)
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(("endpoint", "members"), BODIES)
async def test_a_request_is_the_same_whichever_process_read_it(
    endpoint: Endpoint, members: dict[str, Any], indent: int | None, session_key: SessionKey, client: Client
) -> None:
    body = json.dumps({"model": "m", **members}, indent=indent).encode()
    one = here(endpoint, body, client, session_key)
    other = await reader(session_key=session_key).turn(endpoint, HEADERS, client, SharedBytes.of([body]))
    assert shown(other) == shown(one)
    assert plain_leg(endpoint, other.fields, "id").body == body or json.loads(
        b"".join(plain_leg(endpoint, other.fields, "id").parts)
    ) == json.loads(plain_leg(endpoint, one.fields, "id").body)
    chain, same = one.prompt.chain, other.prompt.chain
    assert bytes(same.data) == bytes(chain.data)
    replies = [ReplyKey(request) for request in (one, other)]
    for reply in replies:
        reply.add_text("and so on")
    assert replies[0].key() == replies[1].key()
    lists = [prompt_list(request, 10**9) if endpoint is COMPLETIONS else None for request in (one, other)]
    assert (lists[0] is None) == (lists[1] is None)
    if lists[0] is not None and lists[1] is not None:
        assert list(map(bytes, lists[1].prompts)) == list(map(bytes, lists[0].prompts))


@pytest.mark.parametrize("templates", [Templates(("*",)), Templates(tools_first=frozenset(ALIASES.values()))])
async def test_what_is_known_of_templates_reaches_the_helper(templates: Templates) -> None:
    tool_use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    begun = {"role": "assistant", "content": [tool_use, {"type": "text", "text": "so"}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": LONG}]}
    messages = [USER, {"role": "assistant", "content": [tool_use]}, result, begun]
    body = json.dumps({"model": "m", "system": "be brief", "messages": messages, "tools": [TOOL, {"a": 1}]}).encode()
    some = BodyReader(ProxyConfig(), HASHER, lambda: ALIASES, InThisProcess(), lambda: templates)
    one, other = [await some.turn(MESSAGES, HEADERS, ANYBODY, given) for given in (body, SharedBytes.of([body]))]
    assert shown(one) == shown(other)
    assert one.prompt.chain.keys != here(MESSAGES, body, ANYBODY).prompt.chain.keys
    replies = [ReplyKey(request) for request in (one, other)]
    for reply in replies:
        reply.add_tool_call(0, "u", "f", "{}")
    assert replies[0].key() == replies[1].key()


@pytest.mark.parametrize("start", [b'{"model":"x"', b'{"mod\\u0065l":"x"'])
async def test_a_body_that_parsers_could_read_differently_is_encoded_anew(start: bytes) -> None:
    twice = start + b',"messages":[{"role":"user","content":"hi"}],"model":"m"}'
    request = await reader().turn(CHAT, {}, ANYBODY, SharedBytes.of([twice]))
    sent = b"".join(plain_leg(CHAT, request.fields, "id").parts)
    assert request.model == "m"
    assert sent.count(b"model") == 1
    assert json.loads(sent) == json.loads(twice)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[]", "the body is not a JSON object"),
        (b'{"messages":[]}', "model: is missing"),
        (b'{"model":"m","messages":[' + b"{}," * 30 + b"{}]}", "at most 20 are allowed"),
        (b"[" * 100, "nested deeper"),
        (b'{"model":"m","messages":[{"role":"user","content":"hi"}],"a\\"b":1}', "must need no escapes"),
    ],
)
async def test_what_is_wrong_with_a_large_body_is_told_as_for_a_small_one(body: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        await reader(request_units_limit=20).turn(CHAT, {}, ANYBODY, SharedBytes.of([body]))
    assert caught.value.status == 400


@pytest.mark.parametrize("size", [0, 8192], ids=["short", "longer"])
async def test_the_units_of_a_small_body_are_bounded_too(size: int) -> None:
    start = b'{"model":"m","x":"' + b"y" * size + b'","messages":['
    some = reader(request_units_limit=20)
    message = b'{"role":"user","content":"hi"}'
    await some.turn(CHAT, {}, ANYBODY, start + b",".join([message] * 20) + b"]}")
    with pytest.raises(RequestError, match="at most 20 are allowed"):
        await some.turn(CHAT, {}, ANYBODY, start + b",".join([message] * 21) + b"]}")


async def test_bodies_that_are_large_or_intricate_go_to_the_helper() -> None:
    class Refusing(InThisProcess):
        async def ask(self, name: str, arguments: bytes, shared: SharedBytes) -> tuple[bytes, SharedBytes | None]:
            raise AssertionError(len(shared))

    some = BodyReader(ProxyConfig(), HASHER, helper=Refusing())
    start = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"x":'
    await some.turn(CHAT, {}, ANYBODY, start + b'"' + b"y" * 900_000 + b'"}')
    for more in (b'"' + b"y" * LARGE_BYTES + b'"}', b"[" + b"1," * 30_000 + b"1]}"):
        with pytest.raises(AssertionError):
            await some.turn(CHAT, {}, ANYBODY, start + more)
        with pytest.raises(AssertionError):
            await some.forwarded("application/json", start + more, ANYBODY, "/pooling")


@pytest.mark.skipif(not plane.IS_BUILT, reason="compiled code finds the frames")
async def test_a_chat_whose_frame_is_known_has_the_same_limits() -> None:
    class Refusing(InThisProcess):
        async def ask(self, name: str, arguments: bytes, shared: SharedBytes) -> tuple[bytes, SharedBytes | None]:
            raise AssertionError(name)

    def chat(*messages: object) -> bytes:
        return json.dumps({"model": "m", "messages": messages}).encode()

    def reads(**settings: Any) -> BodyReader:
        return BodyReader(ProxyConfig(**settings), HASHER, lambda: ALIASES, Refusing(), lambda: NO_TEMPLATES)

    nested = {**USER, "content": [{"type": "text", "text": "a", "x": [[1]]}]}
    some, few, flat = reads(), reads(request_units_limit=200), reads(json_depth_limit=5)
    for one in (some, few, flat):
        for _ in range(2):
            await one.turn(CHAT, {}, ANYBODY, chat(USER))
        assert len(one._frames[Endpoint.CHAT]) == 1
    for many in ([USER] * 8000, [{**USER, "content": "\n" * 330_000}], [{**USER, "content": "x" * LARGE_BYTES}]):
        with pytest.raises(AssertionError, match="turn"):
            await some.turn(CHAT, {}, ANYBODY, chat(*many))
    await few.turn(CHAT, {}, ANYBODY, chat(*[USER] * 200))
    with pytest.raises(RequestError, match="at most 200 are allowed"):
        await few.turn(CHAT, {}, ANYBODY, chat(*[USER] * 201))
    with pytest.raises(RequestError, match="nested deeper than 5 levels"):
        await flat.turn(CHAT, {}, ANYBODY, chat(USER, nested))


@pytest.mark.parametrize(("endpoint", "member", "is_here"), [(CHAT, "messages", True), (RESPONSES, "input", False)])
async def test_items_of_responses_go_to_the_helper_sooner(endpoint: Endpoint, member: str, is_here: bool) -> None:
    """One takes as long to read as several messages."""
    asked = []

    class Asked(InThisProcess):
        async def ask(self, name: str, arguments: bytes, shared: SharedBytes) -> tuple[bytes, SharedBytes | None]:
            asked.append(name)
            return await super().ask(name, arguments, shared)

    body = json.dumps({"model": "m", member: [USER] * 4000})  # 12,000 values
    await BodyReader(ProxyConfig(), HASHER, helper=Asked()).turn(endpoint, {}, ANYBODY, body.encode())
    assert asked == ([] if is_here else ["turn"])


async def test_a_forwarded_body_loses_what_no_worker_may_see() -> None:
    some, client = reader(), Client(name="k", tenant="k", priority=5)
    model, same = await some.forwarded(
        "application/json", SharedBytes.of([b'{"model":"m","input":"x"}']), client, "/pooling"
    )
    assert (model, isinstance(same, SharedBytes) and bytes(same.view())) == ("m", b'{"model":"m","input":"x"}')
    _, changed = await some.forwarded(
        "", SharedBytes.of([b'{"model":"m","kv_transfer_params":{},"priority":1}']), client, "/pooling"
    )
    assert isinstance(changed, SharedBytes)
    assert msgspec.json.decode(changed.view()) == {"model": "m", "priority": 5}


async def test_a_large_answer_tells_of_its_handle_and_hides_what_the_client_did_not_ask_for() -> None:
    answer = {
        "choices": [{"index": 0, "message": {"content": "hi"}, "token_ids": [3, 4], "finish_reason": "stop"}],
        "prompt_token_ids": list(range(300_000)),
        "kv_transfer_params": {"do_remote_decode": True, "remote_num_tokens": 300_001},
    }
    body = msgspec.json.encode(answer)
    assert len(body) > LARGE_BYTES
    for reads in (True, False):
        observer, small = (AnswerObserver(Endpoint.CHAT, reads_handle=reads) for _ in range(2))
        small.observe_body(body)
        reply = ReplyKey(here(Endpoint.CHAT, msgspec.json.encode({"model": "m", "messages": [USER]}), ANYBODY))
        shown = await reader().answer(SharedBytes.of([body]), ReadAnswer(Endpoint.CHAT, None, reads), observer, reply)
        assert observer.summary == small.summary
        assert (observer.summary.handle is not None) is reads
        assert (b"token_ids" in bytes(shown.view())) is not reads
