"""What Envoy is told at each stage of a request, and what the proxy's books say meanwhile and after it."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ppd.proxy.admission.keys import Client, encode, hash_of
from ppd.proxy.config import Mode
from ppd.proxy.gateway.answers import PIECE_BYTES
from ppd.proxy.gateway.headers import ATTEMPTS, DESTINATION, PREFILLER
from ppd.proxy.gateway.messages import ProcessingRequest
from ppd.proxy.gateway.wire.grpc import GrpcStatus
from ppd.proxy.peers.turn_replication import CopiesAtOnce
from tests.proxy.gateway.envoy import (
    D1,
    D2,
    P1,
    R1,
    SAID,
    USAGE,
    Envoy,
    chat,
    mutation,
    proxy_of,
    refused,
)
from tests.support.decisions import LLM_D_EXAMPLE

HEAD = "request_headers"


async def test_llm_ds_configuration_decides_here_too() -> None:
    workers = (f"P={P1},label.role=prefill", f"D={D1}", f"D={D2},label.role=decode")
    proxy = proxy_of(workers, mode=Mode.PROFILES, epp_config=str(LLM_D_EXAMPLE))
    for prefill in (P1, None):  # the same prompt again is known there
        await (envoy := Envoy(proxy)).turn()
        assert [mutation(envoy.answers[-1])[0].get(name) for name in (DESTINATION, PREFILLER)] == [D2, prefill]


@pytest.mark.parametrize("usage", [USAGE, None])
async def test_other_processes_are_told_before_the_client_has_the_end(usage: dict[str, Any] | None) -> None:
    envoy, told = Envoy(proxy_of(mode="always_split")), list[str]()
    envoy.proxy.state.sessions.replicated = CopiesAtOnce(
        lambda: None,
        lambda *_: told.append("changed"),
        lambda: told.append(f"told, {len(envoy.answers)} answers to Envoy"),
        lambda: asyncio.sleep(0),
    )
    await envoy.turn()
    envoy.tell("response_headers", headers={":status": "200", "content-type": "application/json"})
    before = len(envoy.answers)
    choice = {"index": 0, "message": {"role": "assistant", "content": "So that"}, "finish_reason": "stop"}
    body = json.dumps({"choices": [choice], "usage": usage}).encode()
    envoy.tell("response_body", body=body, end_of_stream=True)
    assert told == ["changed", f"told, {before} answers to Envoy"]
    assert len(envoy.answers) > before
    envoy.call.half_closed()


async def test_a_first_turn_is_split_and_its_answer_teaches_the_session() -> None:
    envoy = Envoy(proxy_of(mode="always_split"))
    forged = {PREFILLER: "10.9.9.9:1", "x-data-parallel-rank": "7", "x-forwarded-for": "192.0.2.1", "accept": "*/*"}
    await envoy.turn(headers=forged)
    first, second = envoy.answers
    assert first.WhichOneof("response") == "request_headers"
    sent, removed = mutation(second)
    assert (sent[DESTINATION] in (D1, D2), sent[PREFILLER], sent["x-request-id"]) == (True, P1, envoy.receipt.id)
    assert removed == ["x-data-parallel-rank"]
    assert second.request_body.response.clear_route_cache
    assert second.dynamic_metadata["envoy.lb"][DESTINATION] == sent[DESTINATION]
    assert not envoy.is_idle

    envoy.tell("response_headers", headers={":status": "200", "content-type": "application/json"})
    told, _ = mutation(envoy.answers[-1], "response_headers")
    assert (told["x-ppd-route"], told["x-ppd-prefill"]) == ("SPLIT", "P1")
    assert not any(D1 in value or D2 in value or P1 in value for value in told.values())
    reply = {"role": "assistant", "content": "So that"}
    answer = {"choices": [{"index": 0, "message": reply, "finish_reason": "stop"}], "usage": USAGE}
    envoy.tell("response_body", body=json.dumps(answer).encode(), end_of_stream=True)
    envoy.call.half_closed()
    assert (envoy.receipt.outcome, envoy.receipt.prompt_tokens, envoy.receipt.counts_evidence) == (
        "completed",
        800,
        "usage",
    )
    assert envoy.is_idle

    later = Envoy(envoy.proxy)
    await later.turn(
        json.dumps({"model": "m", "messages": [*SAID, reply, {"role": "user", "content": "And?"}]}).encode()
    )
    assert (later.receipt.kind, later.receipt.turn) == ("next", 2)
    later.call.lost()
    assert later.is_idle


async def test_numbers_of_any_length_in_an_answers_head_end_the_turn_as_any_failure() -> None:
    envoy = Envoy(proxy_of((f"R={R1}",)))
    await envoy.turn(chat())
    envoy.tell("response_headers", headers={":status": "2" * 5000, ATTEMPTS: "1" * 5000})
    envoy.call.half_closed()
    assert (envoy.receipt.outcome, envoy.is_idle) == ("failed", True)


STREAM = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "So"}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
]


def events(*data: Any) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in data)


@pytest.mark.parametrize(
    ("status", "pieces", "outcome", "evidence"),
    [
        (200, [events(*STREAM, {"choices": [], "usage": USAGE}) + b"data: [DONE]\n\n"], "completed", "usage"),
        (200, [events(*STREAM)[:50], events(*STREAM)[50:], b"data: [DONE]\n\n"], "completed", "estimate"),
        (200, [], "completed", "estimate"),  # nobody saw the answer
        (200, [events(*STREAM[:2])], "broken", "usage"),
        (503, [b"upstream connect error"], "failed", "usage"),
        (400, [b"{}"], "rejected", "usage"),
        (None, [], "cancelled", "usage"),  # the client has gone before the head
    ],
)
@pytest.mark.parametrize("ends", ["half_closed", "lost"])
async def test_what_became_of_a_turn(
    status: int | None, pieces: list[bytes], outcome: str, evidence: str, ends: str
) -> None:
    envoy = Envoy(proxy_of((f"R={R1}",)))
    await envoy.turn(chat(stream=True))
    if status is not None:
        envoy.tell("response_headers", headers={":status": str(status), "content-type": "text/event-stream"})
    for piece in pieces:
        envoy.tell("response_body", body=piece)
    getattr(envoy.call, ends)()
    getattr(envoy.call, ends)()
    assert (envoy.receipt.outcome, envoy.receipt.counts_evidence) == (outcome, evidence)
    assert envoy.is_idle
    again = Envoy(envoy.proxy)
    await again.turn(chat(stream=True))
    assert again.receipt.kind == ("retry" if outcome == "completed" else "first")


async def test_failures_of_a_worker_open_its_breaker() -> None:
    envoy = Envoy(proxy_of((f"R={R1}",)))
    for _ in range(4):
        envoy = Envoy(envoy.proxy)
        await envoy.turn()
        envoy.tell("response_headers", headers={":status": "500"}, end_of_stream=True)
    assert envoy.proxy.state.health.breakers.states(envoy.proxy.state.now())


# -- bodies


async def test_a_body_that_goes_through_is_sent_back_in_pieces_behind_the_decision() -> None:
    envoy = Envoy(proxy_of(), duplex=True)
    body = chat(user="x" * 2 * PIECE_BYTES)
    envoy.head()
    envoy.tell("request_body", body=body[:1000])
    assert not envoy.answers
    envoy.tell("request_body", body=body[1000:], end_of_stream=True)
    await envoy.settled()
    head, *pieces = envoy.answers
    assert mutation(head, "request_headers")[0][DESTINATION] in (D1, D2)
    streamed = [one.request_body.response.body_mutation.streamed_response for one in pieces]
    assert b"".join(one.body for one in streamed) == body
    assert [one.end_of_stream for one in streamed] == [False, False, True]
    envoy.tell("response_headers", headers={":status": "200"})
    envoy.tell("response_body", body=b"an answer", end_of_stream=True)
    back = envoy.answers[-1].response_body.response.body_mutation.streamed_response
    assert (back.body, back.end_of_stream) == (b"an answer", True)


@pytest.mark.parametrize("mode", [0, 1, 3])  # none, streamed one way, the first part
async def test_a_gateway_that_does_not_show_bodies_whole_serves_nothing(mode: int) -> None:
    envoy = Envoy(proxy_of(), body_mode=mode)
    envoy.head(headers={DESTINATION: "10.9.9.9:1"})
    assert (refused(envoy.answers[-1])[0], envoy.status) == (500, GrpcStatus.OK)


async def test_a_body_that_is_held_is_whole_though_trailers_follow_it() -> None:
    envoy = Envoy(proxy_of())
    envoy.head()
    envoy.tell("request_body", body=chat(), end_of_stream=False)
    await envoy.settled()
    assert mutation(envoy.answers[-1])[0][DESTINATION] in (D1, D2)
    envoy.tell("request_trailers")
    assert envoy.answers[-1].WhichOneof("response") == "request_trailers"
    envoy.call.lost()


async def test_a_worker_that_a_client_names_is_forgotten_before_the_body_comes() -> None:
    envoy = Envoy(proxy_of())
    envoy.head(headers={DESTINATION: "10.9.9.9:1"})
    assert mutation(envoy.answers[-1], "request_headers") == ({}, [DESTINATION])


async def test_trailers_end_a_body_too() -> None:
    envoy = Envoy(proxy_of(), duplex=True)
    envoy.head()
    envoy.tell("request_body", body=chat())
    envoy.tell("request_trailers")
    await envoy.settled()
    assert [one.WhichOneof("response") for one in envoy.answers] == [
        "request_headers",
        "request_body",
        "request_trailers",
    ]
    assert not envoy.answers[1].request_body.response.body_mutation.streamed_response.end_of_stream


@pytest.mark.parametrize(
    ("body", "headers", "gone"),
    [
        (chat(kv_transfer_params={"remote_host": "10.9.9.9"}), {}, []),
        (gzip.compress(chat()), {"content-encoding": "gzip"}, ["content-encoding"]),
    ],
)
@pytest.mark.parametrize("duplex", [False, True])
async def test_workers_get_another_body_where_they_must(
    body: bytes, headers: dict[str, str], gone: list[str], duplex: bool
) -> None:
    envoy = Envoy(proxy_of(), duplex=duplex)
    await envoy.turn(body, {**headers, "content-length": str(len(body))})
    if duplex:
        head, last = envoy.answers
        new, (sent, removed) = last.request_body.response.body_mutation.streamed_response.body, mutation(head, HEAD)
    else:
        new, (sent, removed) = envoy.answers[1].request_body.response.body_mutation.body, mutation(envoy.answers[1])
    assert json.loads(new) == json.loads(chat())
    assert (sent["content-length"], removed) == (str(len(new)), gone)


# -- refusals


@pytest.mark.parametrize(
    ("sent", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"[" * 1000, {}, 400),
        (chat(model=""), {}, 400),
        (chat(), {"content-type": "text/plain"}, 415),
        (chat(), {"content-encoding": "br"}, 415),
        (chat(), {"x-ppd-force-route": "LOCAL"}, 403),
        (chat(), {"x-ppd-slo": "fast"}, 400),
        (chat(user="x" * 3000), {}, 413),
        (chat(), {"content-length": "999999"}, 413),
        (chat(), {"content-length": "9" * 5000}, 413),
        (b"", {"content-length": "many"}, 400),
        (b"", {"content-length": "0" * 5000}, 400),
    ],
)
async def test_refusals_are_the_proxys_own(sent: bytes, headers: dict[str, str], status: int) -> None:
    proxy = proxy_of(body_limit_bytes=4096)
    envoy = Envoy(proxy)
    await envoy.turn(sent, headers)
    found, told, body = refused(envoy.answers[-1])
    counted = proxy.state.metrics.registry.get_sample_value
    assert counted("ppd_rejected_requests_total", {"status": str(status)}) == 1
    assert envoy.answers[-1].dynamic_metadata["ppd"]["answered"]  # so Envoy leaves it as it is
    assert (found, told["content-type"], envoy.status) == (status, "application/json", GrpcStatus.OK)
    assert body["error"]["code"]
    assert envoy.is_idle


async def test_a_spent_allowance_is_429_and_says_when_there_is_more(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(encode(Client(name="one", tenant="one", requests_per_minute=1), hash_of("sk-secret")))
    proxy, key = proxy_of(keys_file=str(keys)), {"authorization": "Bearer sk-secret"}
    first, second = Envoy(proxy), Envoy(proxy)
    await first.turn(headers=key)
    first.tell("response_headers", headers={":status": "200"})
    told, _ = mutation(first.answers[-1], "response_headers")
    assert (told["x-ratelimit-limit-requests"], told["x-ratelimit-remaining-requests"]) == ("1", "0")
    await second.turn(headers=key)
    status, headers, body = refused(second.answers[-1])
    assert (status, headers["x-ppd-refused"], body["error"]["code"]) == (
        429,
        "requests_per_minute",
        "requests_per_minute",
    )
    assert 0 < int(headers["retry-after"]) <= 60
    assert headers["x-ratelimit-remaining-requests"] == "0"
    first.call.lost()
    assert first.is_idle


async def test_a_model_that_nobody_serves_is_404() -> None:
    envoy = Envoy(proxy_of((f"D={D1},model=m",)))
    await envoy.turn(chat(model="another"))
    status, _, body = refused(envoy.answers[-1])
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
    assert envoy.is_idle


async def test_a_p_or_encoder_that_a_client_names_is_forgotten_where_there_is_none() -> None:
    envoy = Envoy(proxy_of((f"D={D1}", f"D={D2}")))
    forged = {PREFILLER: "10.9.9.9:1", "x-encoder-hosts-ports": "10.9.9.9:1", DESTINATION: "10.9.9.9:1"}
    await envoy.turn(headers={**forged, "x-ppd-hops": "0", "x-ppd-route": "SPLIT"})
    sent, removed = mutation(envoy.answers[-1])
    assert (envoy.receipt.route, sent[DESTINATION] in (D1, D2)) == ("LOCAL", True)
    assert PREFILLER not in sent
    assert removed == [PREFILLER, "x-encoder-hosts-ports", "x-ppd-route"]
    envoy.call.lost()


async def test_no_worker_is_503_and_says_when_to_come_back() -> None:
    envoy = Envoy(proxy_of(()))
    await envoy.turn()
    status, headers, _ = refused(envoy.answers[-1])
    assert (status, headers["x-ppd-refused"], headers["retry-after"]) == (503, "no_worker", "1")


async def test_keys_are_asked_for_and_go_no_further(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(encode(Client(name="one", tenant="one"), hash_of("sk-secret")))
    proxy = proxy_of(keys_file=str(keys), admin_key="operator")
    stranger, known = Envoy(proxy), Envoy(proxy)
    await stranger.turn()
    assert refused(stranger.answers[-1])[0] == 401
    await known.turn(headers={"authorization": "Bearer sk-secret"})
    sent, removed = mutation(known.answers[-1])
    assert ("authorization" in sent, removed) == (False, ["authorization"])
    assert known.receipt.client == "one"
    assert known.answers[-1].request_body.response.body_mutation.body  # with the tenant's salt


# -- what breaks the order


@pytest.mark.parametrize("first", [b"\xff\xff\xff", ProcessingRequest().SerializeToString()])
async def test_what_is_no_stage_ends_the_call(first: bytes) -> None:
    envoy = Envoy(proxy_of())
    envoy.call.message(first)
    assert (envoy.answers, envoy.status) == ([], GrpcStatus.INVALID_ARGUMENT)


async def test_an_envoy_that_only_watches_is_told_that_nobody_decides() -> None:
    envoy = Envoy(proxy_of())
    request = ProcessingRequest(observability_mode=True)
    request.request_headers.SetInParent()
    envoy.call.message(request.SerializeToString())
    assert (envoy.answers, envoy.status) == ([], GrpcStatus.UNIMPLEMENTED)


async def test_stages_out_of_order_end_the_call() -> None:
    bodyless, twice, late = (Envoy(proxy_of()) for _ in range(3))
    bodyless.tell("request_body", body=b"x")
    twice.head()
    twice.head()
    await late.turn()
    late.tell("request_body", body=b"more", end_of_stream=True)
    assert [one.status for one in (bodyless, twice, late)] == [GrpcStatus.INVALID_ARGUMENT] * 3
    late.call.lost()
    assert late.is_idle


async def test_a_client_that_leaves_while_its_turn_waits_is_forgotten() -> None:
    proxy = proxy_of((f"R={R1}",), max_inflight=1)
    first, second = Envoy(proxy), Envoy(proxy)
    await first.turn()
    await second.turn(chat(seed=1))
    assert proxy.state.admission.waiting == 1
    second.call.lost()
    await second.settled()
    assert proxy.state.admission.waiting == 0
    assert len(second.answers) == 1  # to the head
    first.call.lost()
    assert first.is_idle
