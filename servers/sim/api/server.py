"""The HTTP API of one engine, with the formats of vLLM's OpenAI-compatible server."""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
from aiohttp import web

from ppd.proxy.fleet.worker import Role
from ppd.proxy.laws.step_time import request_time_s

from ..core.config import SimConfig
from ..core.errors import BadRequest, SimError, UnknownName
from ..core.fault_orders import FaultKind, FaultLeg, FaultPhase, Faults, Order
from ..core.handoffs import Transfer
from ..core.tokens import decode
from ..encoding.media_parts import embeddings_given, media_inputs
from ..engine.deltas import DeltaStream
from ..engine.engine import Received, SimEngine
from ..engine.metrics import CONTENT_TYPE
from ..protocols.legs import Leg
from . import pooling
from .completions import BatchChatCompletions, ChatCompletions, Completions, read_prompts
from .engine_apis import APIS
from .fault_injection import Ended, InjectedFault
from .messages import Messages
from .prompts import chat_prompt, messages_prompt
from .reply import Dialect, Reply, json_response, openai_error
from .requests import JsonBody, served_model, session_id
from .response_store import ResponseStore
from .responses import Responses

_MAX_BODY_BYTES = 256 * 1024**2
_GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # the only paths that vLLM's API key protects

_FATAL = Order(FaultKind.KILL)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(engine: SimEngine) -> web.Application:
    server = _Server(engine)
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[server.guard, server.answer_errors])
    get, post = app.router.add_get, app.router.add_post
    post("/v1/chat/completions", server.generates(ChatCompletions()))
    post("/v1/completions", server.generates(Completions()))
    post("/v1/responses", server.generates(Responses(server.responses)))
    get("/v1/responses/{id}", server.read_response)
    post("/v1/responses/{id}/cancel", server.cancel_response)
    post("/v1/messages", server.generates(Messages()))
    post("/v1/messages/count_tokens", server.count_tokens)
    post("/v1/embeddings", server.pools(pooling.embeddings))
    post("/classify", server.pools(pooling.classify))
    for path in ("/score", "/v1/score"):
        post(path, server.pools(pooling.score))
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        post(path, server.pools(pooling.rerank))
    post("/tokenize", server.tokenize)
    post("/detokenize", server.detokenize)
    get("/v1/models", server.models)
    get(server.api.metrics, server.metrics)
    get("/health", server.health)
    if engine.protocol.engine == "vllm":
        post("/v1/chat/completions/batch", server.generates(BatchChatCompletions()))
        post("/v2/embed", server.pools(pooling.embed))
        post("/pooling", server.pools(pooling.pooling))
    server.api.add_routes(app)
    if engine.config.allow_faults:
        post("/faults", server.set_faults)
    return app


class _Server:
    """The handlers. All state is in the engine."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._config = engine.config
        self.api = APIS[engine.protocol.engine](engine)
        self.responses = ResponseStore(is_on=engine.config.stores_responses)

    @web.middleware
    async def guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        key = self._config.api_key
        if key and request.path.startswith(_GUARDED):
            given = request.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {key}".encode()):
                return json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    @web.middleware
    async def answer_errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except SimError as error:
            return json_response(self.api.error(openai_error(error)), status=error.status)
        except web.HTTPException as error:
            return json_response(self.api.error({"detail": error.reason}), status=error.status)

    def generates(self, dialect: Dialect) -> _Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            raw = await request.read()
            self._engine.received.append(Received(request.path, request.headers, raw))
            order = _FATAL if self._is_fatal(raw) else self._engine.faults.take(self._leg_of(raw))
            fault = InjectedFault(order, request, self._engine)
            try:
                if self._config.role is Role.ENCODE:
                    return await fault.instead() or await self._encode(request, raw, fault)
                return await fault.instead() or await self._generate(request, raw, dialect, fault)
            except SimError as error:
                return json_response(self.api.error(dialect.error(error)), status=error.status, headers=fault.headers)
            except (Ended, ConnectionResetError):
                return web.Response()  # to a connection that is gone

        return handle

    def _leg_of(self, raw: bytes) -> FaultLeg:
        """PLAIN if the body cannot be read, and where no order asks."""
        if not self._engine.faults.orders:
            return FaultLeg.PLAIN
        try:
            return self._engine.protocol.leg(JsonBody.decode(raw).members, self._config.role)
        except (SimError, RecursionError):
            return FaultLeg.PLAIN

    def _is_fatal(self, body: bytes) -> bool:
        return bool(self._config.fatal_text) and self._config.fatal_text.encode() in body

    def pools(self, answer: Callable[[JsonBody, SimConfig], dict[str, Any]]) -> _Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            return json_response(answer(await _body(request), self._config))

        return handle

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
        return json_response(
            {"count": len(tokens), "max_model_len": limit, "tokens": list(tokens), "token_strs": texts}
        )

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await _body(request)
            served_model(body, self._config)
            return json_response({"input_tokens": len(messages_prompt(body, self._config))})
        except SimError as error:
            return json_response(Messages().error(error), status=error.status)

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        return json_response({"prompt": decode((await _body(request)).token_ids("tokens"))})

    async def models(self, request: web.Request) -> web.StreamResponse:
        own = self._config.model
        cards: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": int(self._engine.started_at),
                "owned_by": self.api.owner,
                "root": name if name in self._config.loras else own,
                "parent": own if name in self._config.loras else None,
                "max_model_len": None if name in self._config.loras else self._config.max_model_len,
                "permission": [],
            }
            for name in self._config.names
        ]
        return json_response({"object": "list", "data": cards})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        self._engine.handoffs.expire()
        return web.Response(body=self._engine.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=503 if self._engine.is_dead else 200)

    async def set_faults(self, request: web.Request) -> web.StreamResponse:
        try:
            self._engine.faults = msgspec.json.decode(await request.read(), type=Faults)
        except msgspec.DecodeError as exc:
            raise BadRequest(str(exc)) from exc
        return json_response({})

    async def _encode(self, request: web.Request, raw: bytes, fault: InjectedFault) -> web.StreamResponse:
        """An encoder's leg. It answers once all is encoded, with no token, and where the embeddings are."""
        _require_json(request)
        if request.path != "/v1/chat/completions":
            raise UnknownName("This engine only encodes.")
        engine, host_s = self._engine, request_time_s(self._config.profile, 0, 0)
        leg, inputs = engine.encoder.read(raw)
        served_model(JsonBody({"model": leg.model}), self._config)
        await engine.pause(host_s)
        await engine.encoder.encode(inputs)
        fault.before_whole()
        choice = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "stop"}
        payload = {
            "id": f"chatcmpl-{request.headers.get('X-Request-Id') or engine.new_id()}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": leg.model,
            "choices": [choice],
            "usage": {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1},
            **engine.encoder.params(leg, inputs, engine.side_address),
        }
        return await fault.whole(payload)

    async def _generate(
        self, request: web.Request, raw: bytes, dialect: Dialect, fault: InjectedFault
    ) -> web.StreamResponse:
        _require_json(request)
        body = JsonBody.decode(raw)
        try:
            self.api.check(request.path, body.members)
            generation = dialect.read(body, self._config)
            is_named = self.api.hears_uuid and not isinstance(dialect, Messages)
            media = media_inputs(body.members, is_named=is_named)
            given = embeddings_given(body.members, media)
            members = (
                JsonBody({}) if isinstance(dialect, Messages) else body
            )  # in Anthropic's API only the header counts
            generation = replace(
                generation,
                media=tuple(media),
                session_id=session_id(members, request.headers),
                transfers=self._transfers(request, body, len(generation.prompts) * generation.choices),
            )
        except SimError:
            with suppress(SimError):
                self._engine.decline(self._transfers(request, body, 1)[0])
            raise
        if given:
            await self._engine.fetch(media, given)
        reply = Reply(self._id(request, body, dialect), int(time.time()), generation)
        if isinstance(dialect, Responses) and self.responses.runs_in_background(body):
            self.responses.run(dialect.queued(reply), self._finish(body, dialect, reply))
            return json_response(self.responses.read(reply.id))
        async with self._engine.generate(generation, reply.id, abort_after=fault.abort_after) as deltas:
            if generation.stream:
                streamed = await self._stream(request, dialect, reply, deltas, fault)
                self._keep(body, dialect, reply)
                return streamed
            fault.before_whole()
            async for delta in deltas:
                reply.add(delta)
        self._keep(body, dialect, reply)
        payload = dialect.whole(reply)
        fault.spoil(payload)
        return await fault.whole(self.api.whole(payload, generation.prompts[0]))

    def _transfers(self, request: web.Request, body: JsonBody, sequences: int) -> tuple[Transfer, ...]:
        leg = Leg(request.path, body.members, request.headers, sequences)
        return self._engine.protocol.read(leg, self._engine.own)

    def _id(self, request: web.Request, body: JsonBody, dialect: Dialect) -> str:
        own = body.text("request_id")
        if self.api.owner == "sglang":
            return body.text("rid") or self._engine.new_id()
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
        return json_response(self.responses.read(request.match_info["id"]))

    async def cancel_response(self, request: web.Request) -> web.StreamResponse:
        return json_response(self.responses.cancel(request.match_info["id"]))

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
