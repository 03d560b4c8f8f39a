"""What an Envoy that asks about every request is told of those that are no turns: the proxy's own answer, at once."""

from __future__ import annotations

import gzip
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ppd.proxy.admission.keys import Client, encode, hash_of
from ppd.proxy.assembly import Proxy
from ppd.proxy.bodies.body_memory import BodyMemory
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.gateway import other_requests
from ppd.proxy.gateway.headers import DESTINATION, LB_NAMESPACE, SUBSET, SUBSET_NAMESPACE
from ppd.proxy.gateway.messages import BUFFERED, ProcessingRequest
from ppd.proxy.gateway.wire.grpc import GrpcStatus
from ppd.proxy.passthrough.passthrough import ONLY
from tests.proxy.gateway.envoy import CHAT, D1, D2, SPLITS, Envoy, chat, mutation, proxy_of, refused

KEY = {"authorization": "Bearer sk-secret"}
OPERATOR = {"x-admin-key": "operator"}


def keyed(tmp_path: Path, **settings: Any) -> Proxy:
    keys = tmp_path / "keys.toml"
    keys.write_text(encode(Client(name="one", tenant="one"), hash_of("sk-secret")))
    return proxy_of(SPLITS, keys_file=str(keys), admin_key="operator", open_paths=("/health",), **settings)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/v1/embeddings", {}, 401),
        ("POST", "/tokenize", {}, 401),
        ("POST", "/v1/audio/transcriptions", {}, 401),
        ("GET", "/v1/models", {}, 401),
        ("GET", "/version", {}, 401),
        ("GET", "/v1/responses/resp_1", {}, 401),
        ("GET", "/metrics", {}, 401),
        ("GET", "/metrics", KEY, 401),  # a client's key does not open it
        ("GET", "/metrics", OPERATOR, 200),
        ("GET", "/health", {}, 200),
        ("GET", "/admin/workers", KEY, 401),
        ("POST", "/v1/load_lora_adapter", KEY, 404),
        ("POST", "/reset_prefix_cache", KEY, 404),
        ("POST", "/inference/v1/generate", KEY, 404),
        ("GET", "/docs", {}, 404),
        ("GET", CHAT, KEY, 405),
        ("POST", "/v1//chat/completions", KEY, 404),
        ("POST", f"{CHAT}/", KEY, 404),
        ("POST", "/v1/audio/..%2fcompletions", KEY, 404),
        ("POST", "/V1/completions", KEY, 404),
    ],
)
async def test_it_is_answered_as_the_proxy_does_and_reaches_no_worker(
    tmp_path: Path, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    envoy = Envoy(keyed(tmp_path))
    envoy.head(path, method, headers={**headers, DESTINATION: D1}, end_of_stream=method == "GET")
    if method == "POST":
        envoy.tell("request_body", body=b"{}", end_of_stream=True)
    await envoy.settled()
    told = envoy.answers[-1].immediate_response
    assert (told.status.code, envoy.status) == (status, GrpcStatus.OK)
    assert not any(LB_NAMESPACE in one.dynamic_metadata for one in envoy.answers)
    assert envoy.is_idle


@pytest.mark.parametrize(
    "path", ["/v1/chat/%63ompletions", f"{CHAT}?beta=true", "/v1/chat%2Fcompletions?x", f"/{CHAT}"]
)
async def test_a_turn_in_another_spelling_is_a_turn_and_goes_on_in_the_usual_one(tmp_path: Path, path: str) -> None:
    stranger, known = (Envoy(proxy) for proxy in [keyed(tmp_path)] * 2)
    await stranger.turn(path=path)
    assert refused(stranger.answers[-1])[0] == 401
    await known.turn(path=path, headers=KEY)
    assert mutation(known.answers[-1])[0][":path"] == CHAT
    known.call.lost()


async def test_a_turn_without_a_body_is_refused() -> None:
    envoy = Envoy(proxy_of())
    envoy.head(end_of_stream=True)
    await envoy.settled()
    assert (refused(envoy.answers[-1])[0], len(envoy.answers)) == (400, 1)


async def test_a_stranger_is_refused_before_the_body_comes(tmp_path: Path) -> None:
    envoy = Envoy(keyed(tmp_path), duplex=True)
    envoy.head("/v1/embeddings")
    await envoy.settled()
    assert refused(envoy.answers[-1])[0] == 401
    envoy.tell("request_body", body=b"{}", end_of_stream=True)
    assert len(envoy.answers) == 1


# -- with an application of the test's own

App = Callable[[Any, Any, Any], Awaitable[None]]


class Asked(Envoy):
    """Its requests that are no turns are answered by `app`."""

    app: App

    async def answer_other(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


def asked(app: App, proxy: Proxy | None = None, **more: Any) -> Asked:
    envoy = Asked(proxy or proxy_of(), **more)
    envoy.app = app
    return envoy


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body, has_more = b"", True
    while has_more:
        event = await receive()
        body, has_more = body + event["body"], event["more_body"]
    headers = [(b"Content-Length", b"%d" % len(body)), (b"X-Path", scope["raw_path"] + b"?" + scope["query_string"])]
    await send({"type": "http.response.start", "status": 207, "headers": headers})
    await send({"type": "http.response.body", "body": body[:1], "more_body": True})
    await send({"type": "http.response.body", "body": body[1:], "more_body": False})
    assert await receive() == {"type": "http.disconnect"}, "Quart 0.23 waits for that"


@pytest.mark.parametrize("duplex", [False, True])
async def test_the_body_comes_in_pieces_and_the_answer_goes_whole(duplex: bool) -> None:
    envoy = asked(echo, duplex=duplex)
    envoy.head("/v1/%65mbeddings?a=b")
    for piece in (b"some ", b"text") if duplex else (b"some text",):
        envoy.tell("request_body", body=piece)
    envoy.tell("request_trailers")
    await envoy.settled()
    told = envoy.answers[-1].immediate_response
    headers = {one.header.key: one.header.raw_value for one in told.headers.set_headers}
    assert (told.status.code, told.body, headers) == (207, b"some text", {"x-path": b"/v1/%65mbeddings?a=b"})
    assert envoy.status is GrpcStatus.OK


@pytest.mark.parametrize("ends", ["half_closed", "lost"])
async def test_a_client_that_leaves_is_told_to_the_application(ends: str) -> None:
    heard = []

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        heard.append(await receive())

    envoy = asked(waits)
    envoy.head("/v1/embeddings")
    getattr(envoy.call, ends)()
    await envoy.settled()
    assert heard == [{"type": "http.disconnect"}]
    assert len(envoy.answers) == 1  # to the head


async def test_an_answer_that_is_too_long_and_an_application_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_requests, "ANSWER_LIMIT_BYTES", 8)
    envoy = asked(echo)
    envoy.head("/v1/embeddings")
    envoy.tell("request_body", body=b"123456789", end_of_stream=True)
    await envoy.settled()
    assert refused(envoy.answers[-1])[0] == 502

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("10.0.0.1 is secret")

    envoy = asked(fails)
    envoy.head("/v1/embeddings", end_of_stream=True)
    await envoy.settled()
    status, _, body = refused(envoy.answers[-1])
    assert (status, body["error"]["message"]) == (500, "internal error")


async def test_a_body_without_end_is_cut_off_at_the_limit() -> None:
    left = []

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        while (event := await receive())["type"] == "http.request":
            pass
        left.append(event["type"])

    envoy = asked(reads, proxy_of(body_limit_bytes=4096), duplex=True)
    envoy.head("/v1/embeddings")
    for _ in range(5):
        envoy.tell("request_body", body=b"x" * 1000)
    await envoy.settled()
    assert (refused(envoy.answers[-1])[0], left) == (413, ["http.disconnect"])
    assert not envoy.proxy.body_memory.held_bytes


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_a_body_that_waits_for_memory_goes_on_when_there_is_some(path: str) -> None:
    proxy = proxy_of()
    memory = BodyMemory(20_000, 10.0)
    object.__setattr__(proxy, "body_memory", memory)
    other = memory.room()
    await other.wait(15_000)
    envoy = asked(echo, proxy)
    envoy.head(path)
    envoy.tell("request_body", body=chat(user="x" * 10_000), end_of_stream=True)
    await envoy.settled()
    assert len(envoy.answers) == 1
    other.free()
    await envoy.settled()
    assert len(envoy.answers) == 2
    envoy.call.lost()
    assert not memory.held_bytes


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_a_body_in_gzip_waits_for_the_memory_of_what_it_decodes_to(path: str) -> None:
    proxy = proxy_of()
    memory = BodyMemory(20_000, 10.0)
    object.__setattr__(proxy, "body_memory", memory)
    other = memory.room()
    await other.wait(15_000)
    envoy = Envoy(proxy)
    envoy.head(path, headers={"content-encoding": "gzip"})
    envoy.tell("request_body", body=gzip.compress(b" " * 10_000), end_of_stream=True)
    await envoy.settled()
    assert len(envoy.answers) == 1
    other.free()
    await envoy.settled()
    assert refused(envoy.answers[-1])[0] == 400
    assert not memory.held_bytes


async def test_a_subset_binds_here_too() -> None:
    seen = []

    async def notes(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["state"][ONLY])

    proxy = proxy_of()
    for metadata in ({}, {SUBSET_NAMESPACE: {SUBSET: D2}}):
        asked(notes, proxy).head("/v1/embeddings", end_of_stream=True, metadata=metadata)
        await Envoy(proxy).settled()
    assert seen == [None, {D2}]
    assert [view.id for view in proxy.passthrough.within({WorkerId(D2)}).candidates()] == [D2]
    nobody = Envoy(proxy)
    nobody.head("/v1/embeddings", metadata={SUBSET_NAMESPACE: {SUBSET: "10.9.9.9:1"}})
    nobody.tell("request_body", body=b'{"model": "m", "input": "x"}', end_of_stream=True)
    await nobody.settled()
    assert refused(nobody.answers[-1])[0] == 503


async def test_names_and_values_that_http_does_not_have_break_nothing() -> None:
    """Found by the target `http2`."""
    envoy = Envoy(proxy_of())
    request = ProcessingRequest()
    request.protocol_config.request_body_mode = BUFFERED
    headers = {":method": "GET", ":path": "/health", "\u018d": "x", "x-trace": "\u018d", "x-cut": "a\nb", "x\n": "c"}
    for name, value in headers.items():
        request.request_headers.headers.headers.add(key=name, value=value)
    request.request_headers.end_of_stream = True
    envoy.call.message(request.SerializeToString())
    await envoy.settled()
    assert refused(envoy.answers[0])[0] == 200
