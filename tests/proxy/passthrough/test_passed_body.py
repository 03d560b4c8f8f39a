"""What may pass through in a body, and what an answer that passes through says of itself."""

from __future__ import annotations

import json

import pytest

from ppd.proxy.admission.keys import Client
from ppd.proxy.admission.tenant_scope import TenantScope
from ppd.proxy.bodies.forwarded import public_body
from ppd.proxy.errors import RequestError
from ppd.proxy.passthrough.passthrough import TotalTokens

ANYBODY = Client(name="", tenant="")
BATCH = Client(name="batch", tenant="batch", priority=10)
SCOPE = TenantScope(b"of a cache group", b"of a tenant's ids")
OURS = Client(name="ours", tenant="ours", scope=SCOPE)


@pytest.mark.parametrize(
    ("sent", "left"),
    [
        ({"input": "x", "kv_transfer_params": {"do_remote_prefill": True}}, {"input": "x"}),
        ({"input": "x", "ec_transfer_params": {"peer": "a:1"}}, {"input": "x"}),
        ({"input": "x", "request_id": "a"}, {"input": "x"}),
        (
            {"messages": [[{"content": [{"type": "image_url", "image_url": "u", "uuid": "a"}, {"uuid": "b"}]}]]},
            {"messages": [[{"content": [{"type": "image_url", "image_url": "u"}, {"uuid": "b"}]}]]},
        ),
        (
            {"input": "x", "vllm_xargs": {"kv_transfer_params": {}, "ec_transfer_params": {}, "n": 1}},
            {"input": "x", "vllm_xargs": {"n": 1}},
        ),
        (
            {"input": {"kv_transfer_params": 1}, "unknown": [1.50]},
            {"input": {"kv_transfer_params": 1}, "unknown": [1.5]},
        ),
    ],
)
def test_members_that_end_at_the_proxy_are_removed_and_no_others(sent: object, left: object) -> None:
    assert json.loads(public_body(json.dumps(sent).encode(), ANYBODY, 64)) == left


@pytest.mark.parametrize(
    ("path", "own", "seen"),
    [
        ("/v1/embeddings", None, SCOPE.salt()),
        ("/pooling", "mine", SCOPE.salt("mine")),
        ("/tokenize", None, None),
        ("/tokenize", "mine", "mine"),
    ],
)
def test_prompts_that_engines_cache_are_salted(path: str, own: str | None, seen: str | None) -> None:
    sent = {"input": "x", "session_id": "s"} | ({"cache_salt": own} if own else {})
    left = json.loads(public_body(json.dumps(sent).encode(), OURS, 64, path))
    assert left == {"input": "x", "session_id": SCOPE.id("s")} | ({"cache_salt": seen} if seen else {})


def test_a_salt_that_is_no_text_is_refused_of_a_key() -> None:
    with pytest.raises(RequestError, match="cache_salt"):
        public_body(b'{"cache_salt": 1}', OURS, 64, "/v1/embeddings")


def test_a_name_written_in_escapes_is_the_same_name() -> None:
    assert public_body(b'{"\\u006bv_transfer_params":{},"a":1}', ANYBODY, 64) == b'{"a":1}'


@pytest.mark.parametrize("client", [ANYBODY, BATCH])
def test_a_body_with_nothing_to_remove_stays_as_it_came(client: Client) -> None:
    body = b' {"b" : 1.50,  "a":"\\u0041", "priority":null}\n'
    assert public_body(body, client, 64) is body


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params":{},"x":NaN}',
        '{"kv_transfer_params":{}}'.encode("utf-16"),
        '{"kv_transfer_params":{}}'.encode("utf-8-sig"),
        b'{"kv_transfer_params":{}} {}',
        b"[1]",
        b"model=sim",
        b'{"x":' + b"[" * 64 + b"]" * 64 + b"}",
        b'{"x":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_a_worker_may_read_otherwise_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        public_body(body, ANYBODY, 64)


@pytest.mark.parametrize(
    ("client", "asked", "seen"),
    [(ANYBODY, -1000, -1000), (BATCH, -1000, 10), (BATCH, 10.0, 10), (BATCH, 20, 20), (BATCH, 10**6, 1000)],
)
def test_the_priority_is_one_that_the_key_allows(client: Client, asked: float, seen: int) -> None:
    body = json.dumps({"input": "x", "priority": asked}).encode()
    assert json.loads(public_body(body, client, 64)) == {"input": "x", "priority": seen}


@pytest.mark.parametrize("asked", ["-1000", 0.5, True, [1]])
def test_a_priority_that_is_no_number_is_refused_of_a_key(asked: object) -> None:
    with pytest.raises(RequestError, match="priority"):
        public_body(json.dumps({"priority": asked}).encode(), BATCH, 64)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        (b'{"data": [0.1, 0.2], "usage": {"prompt_tokens": 12, "total_tokens": 345}}', 345),
        (b'{"usage":{"total_tokens":345,"x":1},"results":["' + b"y" * 500 + b'"]}', 345),
        (b'{"usage": {"total_tokens"  :  7 }}', 7),
        (b'{"usage": {"prompt_tokens": 12}}', 0),
        (b'{"text": "\\"total_tokens\\": 99"}', 0),
        (b'{"text": "total_tokens: 99"}', 0),
        (b"", 0),
    ],
)
def test_the_tokens_used_are_read_however_the_answer_is_cut(answer: bytes, tokens: int, size: int) -> None:
    seen = TotalTokens()
    for at in range(0, len(answer), size):
        seen.observe(answer[at : at + size])
    assert seen.tokens == tokens
