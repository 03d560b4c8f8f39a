"""The HTTP API of one engine, with the formats of vLLM's OpenAI-compatible server."""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
from aiohttp import web

from ..core.config import SimConfig
from ..core.errors import BadRequest, SimError
from ..core.fault_orders import FaultKind, FaultPhase, Faults, Order, leg_of
from ..core.tokens import decode
from ..engine.deltas import DeltaStream
from ..engine.engine import Received, SimEngine
from ..engine.metrics import CONTENT_TYPE
from . import pooling
from .completions import BatchChatCompletions, ChatCompletions, Completions, read_prompts
from .fault_injection import Ended, InjectedFault
from .messages import Messages
from .prompts import chat_prompt, messages_prompt
from .reply import Dialect, Reply, openai_error
from .requests import JsonBody, served_model, session_id
from .response_store import ResponseStore
from .responses import Responses

VERSION = "0.33.0"  # the vLLM release whose wire format this follows
_MAX_BODY_BYTES = 256 * 1024**2
_GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # the only paths that vLLM's API key protects

_FATAL = Order(FaultKind.KILL)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(engine: SimEngine) -> web.Application:
    server = _Server(engine)
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[server.guard, server.answer_errors])
    get, post = app.router.add_get, app.router.add_post
    post("/v1/chat/completions", server.generates(ChatCompletions()))
    post("/v1/chat/completions/batch", server.generates(BatchChatCompletions()))
    post("/v1/completions", server.generates(Completions()))
    post("/v1/responses", server.generates(Responses(server.responses)))
    get("/v1/responses/{id}", server.read_response)
    post("/v1/responses/{id}/cancel", server.cancel_response)
    post("/v1/messages", server.generates(Messages()))
    post("/v1/messages/count_tokens", server.count_tokens)
    post("/v2/embed", server.pools(pooling.embed))
    post("/v1/embeddings", server.pools(pooling.embeddings))
    post("/pooling", server.pools(pooling.pooling))
    post("/classify", server.pools(pooling.classify))
    for path in ("/score", "/v1/score"):
        post(path, server.pools(pooling.score))
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        post(path, server.pools(pooling.rerank))
    post("/v1/audio/transcriptions", server.transcribe)
    post("/tokenize", server.tokenize)
    post("/detokenize", server.detokenize)
    get("/v1/models", server.models)
    get("/version", server.version)
    get("/load", server.load)
    get("/metrics", server.metrics)
    get("/health", server.health)
    get("/ping", server.health)
    post("/ping", server.health)
    get("/kv_event_sources", server.kv_event_sources)
    if engine.config.dev_mode:
        post("/reset_prefix_cache", server.reset_prefix_cache)
    if engine.config.allow_faults:
        post("/faults", server.set_faults)
    return app


class _Server:
    """The handlers. All state is in the engine."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._config = engine.config
        self.responses = ResponseStore(is_on=engine.config.stores_responses)

    @web.middleware
    async def guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        key = self._config.api_key
        if key and request.path.startswith(_GUARDED):
            given = request.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {key}".encode()):
                return _json({"error": "Unauthorized"}, status=401)
        return await handler(request)

    @web.middleware
    async def answer_errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except SimError as error:
            return _json(openai_error(error), status=error.status)
        except web.HTTPException as error:
            return _json({"detail": error.reason}, status=error.status)

    def generates(self, dialect: Dialect) -> _Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            raw = await request.read()
            self._engine.received.append(Received(request.path, request.headers, raw))
            order = _FATAL if self._is_fatal(raw) else self._engine.faults.take(leg_of(raw))
            fault = InjectedFault(order, request, self._engine)
            try:
                return await fault.instead() or await self._generate(request, raw, dialect, fault)
            except SimError as error:
                return _json(dialect.error(error), status=error.status, headers=fault.headers)
            except (Ended, ConnectionResetError):
                return web.Response()  # to a connection that is gone

        return handle

    def _is_fatal(self, body: bytes) -> bool:
        return bool(self._config.fatal_text) and self._config.fatal_text.encode() in body

    def pools(self, answer: Callable[[JsonBody, SimConfig], dict[str, Any]]) -> _Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            return _json(answer(await _body(request), self._config))

        return handle

    async def transcribe(self, request: web.Request) -> web.StreamResponse:
        if request.content_type != "multipart/form-data":
            raise BadRequest("The body must be multipart/form-data.")
        form = await request.post()
        upload = form.get("file")
        if not isinstance(upload, web.FileField):
            raise BadRequest("file is required.", "file")
        return _json(pooling.transcription(upload.filename, upload.file.read()))

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        if body.raw("messages") is not None:
            tokens = chat_prompt(body, self._config)
        elif isinstance(prompt := body.raw("prompt"), str):
            (tokens,) = read_prompts(prompt, self._config.tokenizer)
        else:
            raise BadRequest("prompt or messages is required.", "prompt")
        texts = [decode((token,)) for token in tokens] if body.flag("return_token_strs") else None
        limit = self._config.max_model_len
        return _json({"count": len(tokens), "max_model_len": limit, "tokens": list(tokens), "token_strs": texts})

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await _body(request)
            served_model(body, self._config)
            return _json({"input_tokens": len(messages_prompt(body, self._config))})
        except SimError as error:
            return _json(Messages().error(error), status=error.status)

    async def load(self, request: web.Request) -> web.StreamResponse:
        return _json({"server_load": len(list(self._engine.scheduler.sequences))})

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        return _json({"prompt": decode((await _body(request)).token_ids("tokens"))})

    async def models(self, request: web.Request) -> web.StreamResponse:
        own = self._config.model
        cards: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": int(self._engine.started_at),
                "owned_by": "vllm",
                "root": name if name in self._config.loras else own,
                "parent": own if name in self._config.loras else None,
                "max_model_len": None if name in self._config.loras else self._config.max_model_len,
                "permission": [],
            }
            for name in self._config.names
        ]
        return _json({"object": "list", "data": cards})

    async def version(self, request: web.Request) -> web.StreamResponse:
        return _json({"version": VERSION})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        self._engine.handoffs.expire()
        return web.Response(body=self._engine.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=503 if self._engine.is_dead else 200)

    async def kv_event_sources(self, request: web.Request) -> web.StreamResponse:
        """By data-parallel rank. The limits of vLLM's queues are its defaults."""
        if (events := self._engine.events) is None:
            return _json({})
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": events.endpoint,
            "replay_endpoint": events.replay_endpoint,
            "buffer_steps": events.buffer_steps,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": events.topic,
        }
        return _json({"0": source})

    async def reset_prefix_cache(self, request: web.Request) -> web.StreamResponse:
        preempts = request.query.get("reset_running_requests", "false").lower() in ("true", "1", "yes", "on")
        return _json({"success": self._engine.reset_prefix_cache(preempts=preempts)})

    async def set_faults(self, request: web.Request) -> web.StreamResponse:
        try:
            self._engine.faults = msgspec.json.decode(await request.read(), type=Faults)
        except msgspec.DecodeError as exc:
            raise BadRequest(str(exc)) from exc
        return _json({})

    async def _generate(
        self, request: web.Request, raw: bytes, dialect: Dialect, fault: InjectedFault
    ) -> web.StreamResponse:
        _require_json(request)
        body = JsonBody.decode(raw)
        try:
            generation = dialect.read(body, self._config)
            members = (
                JsonBody({}) if isinstance(dialect, Messages) else body
            )  # in Anthropic's API only the header counts
            generation = replace(generation, session_id=session_id(members, request.headers))
        except SimError:
            self._engine.decline(body.raw("kv_transfer_params"))
            raise
        reply = Reply(self._id(request, body, dialect), int(time.time()), generation)
        if isinstance(dialect, Responses) and self.responses.runs_in_background(body):
            self.responses.run(dialect.queued(reply), self._finish(body, dialect, reply))
            return _json(self.responses.read(reply.id))
        async with self._engine.generate(generation, reply.id, abort_after=fault.abort_after) as deltas:
            if generation.stream:
                streamed = await self._stream(request, dialect, reply, deltas, fault)
                self._keep(body, dialect, reply)
                return streamed
            fault.before_whole()
            async for delta in deltas:
                reply.add(delta)
        self._keep(body, dialect, reply)
        return await fault.whole(dialect.whole(reply))

    def _id(self, request: web.Request, body: JsonBody, dialect: Dialect) -> str:
        own = body.text("request_id")
        if isinstance(dialect, Responses):  # which reads no header, and takes the body's as it is
            return own or dialect.id_prefix + self._engine.new_id()
        return dialect.id_prefix + (request.headers.get("X-Request-Id") or own or self._engine.new_id())

    def _keep(self, body: JsonBody, dialect: Dialect, reply: Reply) -> None:
        if isinstance(dialect, Responses) and reply.choices[0].finish is not None:
            self.responses.keep(body, dialect.whole(reply) | {"kv_transfer_params": None})

    async def _finish(self, body: JsonBody, dialect: Dialect, reply: Reply) -> None:
        with suppress(SimError):  # a dead engine leaves it queued
            async with self._engine.generate(reply.generation, reply.id) as deltas:
                async for delta in deltas:
                    reply.add(delta)
            self._keep(body, dialect, reply)

    async def read_response(self, request: web.Request) -> web.StreamResponse:
        return _json(self.responses.read(request.match_info["id"]))

    async def cancel_response(self, request: web.Request) -> web.StreamResponse:
        return _json(self.responses.cancel(request.match_info["id"]))

    async def _stream(
        self, request: web.Request, dialect: Dialect, reply: Reply, deltas: DeltaStream, fault: InjectedFault
    ) -> web.StreamResponse:
        """As on a real server, the status is sent before the engine has produced anything."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)

        async def send(events: Iterable[bytes]) -> None:
            for event in events:
                await fault.before_event(response)
                await response.write(event)

        try:
            await fault.reaches(FaultPhase.HEAD, response)
            opened = False
            async for delta in deltas:
                if not opened:
                    opened = True
                    await send(dialect.opening(reply))
                reply.add(delta)
                await send(dialect.delta(reply, delta))
            *others, last = dialect.closing(reply)
            await send(others)
            await fault.reaches(FaultPhase.LAST, response)
            await send([last])
            await fault.reaches(FaultPhase.END, response)
        except SimError as error:
            for event in dialect.failure(error):
                await response.write(event)
        except Ended:
            pass
        await response.write_eof()
        return response


def _require_json(request: web.Request) -> None:
    if request.content_type != "application/json":
        raise BadRequest("Unsupported Media Type: Only 'application/json' is allowed")


async def _body(request: web.Request) -> JsonBody:
    _require_json(request)
    return JsonBody.decode(await request.read())


def _json(payload: dict[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode(payload)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
