"""What a client sends steers no leg: engines get what the proxy means for them, and nothing more."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd.servers.sim.engine.engine import Received
from tests.support.proxy_thread import Target
from tests.support.raw_http import Answer, exchange_all, post

# Names that a leg may carry; all but the last row are the proxy's own doing.
OWN = {
    "host",
    "accept-encoding",
    "x-request-id",
    "user-agent",
    "content-length",
    "content-type",
    "accept",
    "x-ppd-hops",
}
CLIENTS = {"authorization", "traceparent", "tracestate", "anthropic-version", "x-session-id"}
LEG_ID = re.compile(r"[0-9a-f]{32}-[a-z0-9-]{1,8}")
STEERING = ("kv_transfer_params", "ec_transfer_params", "request_id", "conversation_id")
EVIL = {"do_remote_prefill": True, "remote_host": "10.66.66.66", "remote_port": 1, "remote_engine_id": "e"}
PATHS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}]},
}


@pytest.fixture(scope="module")
def target(start_target: Callable[..., Target]) -> Target:
    return start_target("P1 D1")


def pairs(body: bytes) -> dict[str, Any]:
    """A body's members, none of them there twice at any depth: engines differ in which one they take."""

    def unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(members)) == len(members), [name for name, _ in members]
        return dict(members)

    read = json.loads(body, object_pairs_hook=unique)
    assert isinstance(read, dict)
    return read


def steering(value: Any) -> Iterator[str]:
    """Names under which an engine would take transfer parameters."""
    xargs = value.get("vllm_xargs")
    yield from (name for name in STEERING if name in value)
    if isinstance(xargs, dict):
        yield from (f"vllm_xargs.{name}" for name in STEERING[:2] if name in xargs)


def check_leg(target: Target, leg: Received) -> None:
    names = [name.lower() for name in leg.headers]
    assert len(names) == len(set(names))
    assert set(names) <= OWN | CLIENTS, names
    assert leg.headers["Host"] in {engine.address for engine in target.engines.values()}
    assert LEG_ID.fullmatch(leg.headers["X-Request-Id"])
    assert leg.headers["Content-Type"] == "application/json"
    body = pairs(leg.body)
    params = body.pop("kv_transfer_params", None)
    assert not [*steering(body)]
    if params is not None and params.get("do_remote_prefill"):
        assert params["remote_engine_id"] == target.engines["P1"].engine_id
        assert (params["remote_host"], params["remote_port"]) == target.engines["P1"].side_address
    assert "10.66.66.66" not in json.dumps(params)


def send(target: Target, payloads: list[bytes]) -> list[tuple[Answer, list[Received]]]:
    """Each payload's answer, and what engines got of it."""
    found = []
    for payload in payloads:
        (heard,) = exchange_all(target.port, [payload], quiet_s=20)
        (answer,) = heard.answers
        assert answer.status != 500, payload
        found.append((answer, target.received()))
    target.alarms.check()
    return found


# -- headers

ODD = st.sampled_from(
    [
        "10.66.66.66:80",
        "http://10.66.66.66/",
        "LOCAL",
        "REPLICA",
        "0",
        "-1",
        "___prefill_addr_10.66.66.66:1___decode_addr_10.66.66.66:2_" + "0" * 32,
        "a: b",
        "a, b",
        "a\t b",
        "\u00ff\u0085",
        "x" * 300,
        "",
    ]
)
STEERED = st.sampled_from(
    "Host X-Forwarded-Host X-Forwarded-For Forwarded X-Data-Parallel-Rank X-data-parallel-rank X-Vllm-Priority Cookie "
    "X-Request-Id X-Session-ID X-Session-Affinity X-Correlation-ID X-Prefill-Host X-Decode-Host X-PPD-Route "
    "X-PPD-Decode X-PPD-Prefill X-Original-URL X-Rewrite-URL X-HTTP-Method-Override Content-Type Accept-Encoding Range "
    "User-Agent Traceparent X-SMG-Target-Worker X-LoRA-Id Proxy-Authorization".split()
)


def is_extra_host(lines: list[tuple[str, str]]) -> bool:
    return any(name == "Host" for name, _ in lines)


@given(
    lines=st.lists(st.tuples(STEERED, ODD), min_size=1, max_size=6).filter(lambda lines: not is_extra_host(lines)),
    path=st.sampled_from([*PATHS]),
)
@settings(max_examples=60)
def test_no_header_of_a_client_steers_a_leg(target: Target, lines: list[tuple[str, str]], path: str) -> None:
    body = json.dumps({"model": "sim", "max_tokens": 2, "max_output_tokens": 2, **PATHS[path]}).encode()
    head = b"".join(f"{name}: {value}\r\n".encode("latin1") for name, value in lines)
    ((answer, legs),) = send(target, [post(path, body, head)])
    assert answer.status == 200 and len(legs) in (1, 2)
    for leg in legs:
        check_leg(target, leg)


@pytest.mark.parametrize("host", ["10.66.66.66:80", "127.0.0.1:1", "a/../../b", "[::1]:80", "user@x", ""])
def test_the_host_header_names_no_worker(target: Target, host: str) -> None:
    body = json.dumps({"model": "sim", "max_tokens": 2, **PATHS["/v1/completions"]}).encode()
    payload = post("/v1/completions", body).replace(b"Host: x", b"Host: " + host.encode())
    ((answer, legs),) = send(target, [payload])
    assert answer.status == 200
    for leg in legs:
        check_leg(target, leg)


@pytest.mark.parametrize(
    "head",
    [
        "X-PPD-Force-Route: LOCAL\r\n",
        "X-PPD-Force-Route: LOCAL\r\nX-Admin-Key: guess\r\n",
        "X-PPD-Force-Route: LOCAL\r\nX-Admin-Key:\r\n",
        "X-PPD-Force-Route: LOCAL\r\nAuthorization: Bearer operator\r\n",
        "x-ppd-force-route: SPLIT\r\nX-Api-Key: operator\r\n",
        "X-PPD-Force-Route:\r\n",
        "X-PPD-Force-Route: LOCAL\r\nX-Admin-Key: guess\r\nX-Admin-Key: operator\r\n",
    ],
)
def test_no_route_is_forced_without_the_admin_key(target: Target, head: str) -> None:
    body = json.dumps({"model": "sim", "max_tokens": 2, **PATHS["/v1/completions"]}).encode()
    ((answer, legs),) = send(target, [post("/v1/completions", body, head.encode())])
    assert (answer.status, legs) == (403, [])


@pytest.mark.parametrize("value", ["", "fast", "ttft=0", "ttft=nan", "ttft=1,ttft=1", "tpot=61", "ttft=" + "9" * 4000])
@pytest.mark.parametrize("path", PATHS)
def test_targets_that_cannot_be_read_are_refused_and_no_worker_is_asked(target: Target, path: str, value: str) -> None:
    body = json.dumps({"model": "sim", "max_tokens": 2, **PATHS[path]}).encode()
    ((answer, legs),) = send(target, [post(path, body, f"X-PPD-SLO: {value}\r\n".encode())])
    assert (answer.status, legs) == (400, [])
    error = json.loads(answer.body)["error"]
    assert "X-PPD-SLO: must be like ttft=0.5,tpot=0.03" in error["message"]
    assert error.get("param") == (None if path == "/v1/messages" else "X-PPD-SLO")


def test_targets_reach_no_worker(target: Target) -> None:
    body = json.dumps({"model": "sim", "max_tokens": 2, **PATHS["/v1/completions"]}).encode()
    ((answer, legs),) = send(target, [post("/v1/completions", body, b"x-ppd-slo: ttft=0.5\r\n")])
    assert answer.status == 200
    assert legs
    for leg in legs:
        check_leg(target, leg)


# -- bodies

LITERALS = st.sampled_from(
    [json.dumps(EVIL), "null", "[]", '"x"', "5", json.dumps([EVIL]), '{"kv_transfer_params":' + json.dumps(EVIL) + "}"]
)
MEMBERS = st.sampled_from(
    [
        '"kv_transfer_params"',
        '"ec_transfer_params"',
        '"kv\\u005ftransfer_params"',
        '"vllm_xargs"',
        '"vllm\\u005fxargs"',
        '"request_id"',
        '"conversation_id"',
        '"KV_transfer_params"',
        '"extra_body"',
        '"metadata"',
        '"data_parallel_rank"',
    ]
)


@given(
    extra=st.lists(st.tuples(MEMBERS, LITERALS), min_size=1, max_size=5),
    path=st.sampled_from([*PATHS]),
    stream=st.booleans(),
)
@settings(max_examples=80)
def test_no_member_of_a_body_steers_a_leg(
    target: Target, extra: list[tuple[str, str]], path: str, stream: bool
) -> None:
    plain = json.dumps({"model": "sim", "max_tokens": 2, "max_output_tokens": 2, "stream": stream, **PATHS[path]})
    body = "{" + ",".join(f"{name}:{value}" for name, value in extra) + "," + plain[1:]
    ((answer, legs),) = send(target, [post(path, body.encode())])
    assert answer.status in (200, 400)
    for leg in legs:
        check_leg(target, leg)
    assert not re.search(rb'remote_engine_id|transfer_params":[^n]', answer.body)


# -- what is passed through


@pytest.mark.parametrize(
    "query", ["", "?a=b", "?a=http://10.66.66.66/", "?%0d%0aHost:%20x", "?a#b", "?@10.66.66.66", "?\u00e9"]
)
def test_a_query_is_passed_on_and_names_no_worker(target: Target, query: str) -> None:
    body = b'{"model":"sim","input":"x"}'
    head = b"Content-Type: application/json\r\n"
    payload = post("/v1/embeddings" + query, body, head).replace("\u00e9".encode(), b"%C3%A9")
    ((answer, _),) = send(target, [payload])
    assert answer.status == 200
