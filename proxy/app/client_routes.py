"""The Quart application: its routes for clients and for monitoring, and its error responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from functools import partial

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from ..admission.auth import authenticate, check_operator_path, leg_headers, lowered
from ..admission.keys import Client
from ..assembly import Proxy
from ..errors import BodyTooLarge, NotFound, PPDError, RequestError
from ..openai.request import Endpoint
from ..policy.placement import ways_to_serve
from ..routing.passthrough import AUDIO, ENDPOINTS
from ..routing.router import TurnReply
from ..routing.service import JSON, error_reply
from ..telemetry.merged_metrics import render
from .admin_routes import admin_routes
from .lifespan import close, start
from .openapi import render as render_openapi
from .peer_commands import answer_receipt, answer_receipts, run_command
from .request_body import whole_body

log = logging.getLogger(__name__)


def create_app(proxy: Proxy) -> Quart:
    app = Quart(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = proxy.settings.config.body_limit_bytes
    app.config["BODY_TIMEOUT"] = None  # `whole_body` has its own
    app.config["RESPONSE_TIMEOUT"] = None  # a stream may take long; each read from its worker has a time-out
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    app.url_map.merge_slashes = False  # a redirect would name the client's own Host
    proxy.membership.handlers |= {
        "workers": partial(run_command, proxy),
        "receipt": partial(answer_receipt, proxy.state.receipts),
        "receipts": partial(answer_receipts, proxy.state.receipts),
    }

    @app.before_request
    async def catch_up() -> None:
        proxy.membership.catch_up()

    _turn_routes(app, proxy)
    _passthrough_routes(app, proxy)
    _operator_routes(app, proxy)
    app.register_blueprint(admin_routes(proxy))
    _error_handlers(app)

    @app.while_serving
    async def lifespan() -> AsyncGenerator[None, None]:
        background = start(proxy)
        yield
        await close(proxy, background)

    return app


def _turn_routes(app: Quart, proxy: Proxy) -> None:
    config = proxy.settings.config

    async def turn() -> Response:
        caller = proxy.turns.caller(Endpoint(request.path), lowered(request.headers))
        body = await whole_body(config.idle_timeout_s, config.body_limit_bytes)
        return _response(await proxy.turns.answer(caller, body))

    for endpoint in Endpoint:
        app.add_url_rule(endpoint.value, f"turn_{endpoint.name}", turn, methods=["POST"])


def _response(reply: TurnReply) -> Response:
    return Response(_body(reply), reply.status, reply.headers, content_type=reply.content_type)


def _body(reply: TurnReply) -> bytes | AsyncGenerator[bytes, None]:
    body = reply.body
    if isinstance(body, bytes):
        return body
    task = asyncio.current_task()
    assert task is not None, "runs in the request's task"
    # If the client leaves before the stream is first read, the generator's `finally` never runs.
    task.add_done_callback(lambda _: body.abandon())
    return body.chunks()


def _passthrough_routes(app: Quart, proxy: Proxy) -> None:
    config = proxy.settings.config

    def authenticated() -> tuple[Client, dict[str, str]]:
        headers = lowered(request.headers)
        client = authenticate(headers, proxy.keys)
        return client, leg_headers(headers, proxy.settings.config.worker_api_key, forwards_key=proxy.keys is None)

    async def forward(name: str = "") -> Response:
        if name and not AUDIO.fullmatch(request.path):
            raise NotFound(f"no such path: {request.path}")
        client, headers = authenticated()
        body = await whole_body(config.idle_timeout_s, config.body_limit_bytes)
        target = request.path + ("?" + request.query_string.decode("latin1") if request.query_string else "")
        answer = await proxy.passthrough.forward(request.method, target, body, headers, client)
        proxy.state.metrics.passed_through.labels("/v1/audio" if name else request.path, str(answer.status)).inc()
        return Response(answer.chunks, answer.status, answer.headers)

    for endpoint in ENDPOINTS:
        app.add_url_rule(endpoint, f"forward_{endpoint}", forward, methods=["POST"])
    app.add_url_rule("/v1/audio/<path:name>", "forward_audio", forward, methods=["GET", "POST"])

    @app.get("/v1/models")
    async def models() -> Response:
        client, headers = authenticated()
        return Response(await proxy.passthrough.models(headers, client), content_type=JSON)


def _operator_routes(app: Quart, proxy: Proxy) -> None:
    config = proxy.settings.config

    def check() -> None:
        check_operator_path(lowered(request.headers), request.path, config.open_paths, config.admin_key)

    @app.get("/health")
    async def health() -> Response:
        check()
        return Response("", 200)

    @app.get("/ready")
    async def ready() -> Response:
        check()
        ways = ways_to_serve(proxy.state.registry.views())
        is_ready = any(ways.values()) and not proxy.drain.is_draining
        return Response(msgspec.json.encode(ways), 200 if is_ready else 503, content_type=JSON)

    @app.get("/metrics")
    async def metrics() -> Response:
        check()
        return Response(render(await proxy.membership.total()), content_type=CONTENT_TYPE_LATEST)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(render_openapi(), content_type=JSON)


def _error_handlers(app: Quart) -> None:
    @app.errorhandler(PPDError)
    async def ours(exc: PPDError) -> Response:
        return _refused(exc)

    @app.errorhandler(RequestEntityTooLarge)
    async def too_large(_: RequestEntityTooLarge) -> Response:
        return _refused(BodyTooLarge(f"the body is larger than {app.config['MAX_CONTENT_LENGTH']} bytes"))

    @app.errorhandler(HTTPException)
    async def http(exc: HTTPException) -> Response:
        if exc.code == 404:
            return _refused(NotFound(f"no such path: {request.path}"))
        error = RequestError(exc.description or exc.name)
        error.status = exc.code or 400
        return _refused(error)

    @app.errorhandler(Exception)
    async def unexpected(exc: Exception) -> Response:
        # The exception's text may hold addresses, so the client does not get it.
        log.error("request failed", exc_info=exc)
        return _refused(PPDError("internal error"))


def _refused(exc: PPDError) -> Response:
    return _response(error_reply(exc))
