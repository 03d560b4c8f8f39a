"""The Quart application: the routes, the errors, and the life of the background tasks."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from functools import partial

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from .admin import admin_routes
from .assembly import Proxy
from .auth import forced_route, leg_headers, lowered, tenant_of
from .background import Background
from .errors import BodyTooLarge, NotFound, PPDError, RequestError, WorkerRefused, error_body
from .passthrough import AUDIO, ENDPOINTS
from .receipts import Receipt
from .router import decision_headers
from .turns import Endpoint, parse_request
from .views import ways_to_serve
from .workers import Source

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
JSON = "application/json"


def create_app(proxy: Proxy) -> Quart:
    app = Quart(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = proxy.settings.config.body_limit_bytes
    app.config["BODY_TIMEOUT"] = proxy.settings.config.idle_timeout_s
    app.config["RESPONSE_TIMEOUT"] = None  # a stream may last; each read of it has its own time-out
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    _turn_routes(app, proxy)
    _passthrough_routes(app, proxy)
    _operator_routes(app, proxy)
    app.register_blueprint(admin_routes(proxy))
    _error_handlers(app)

    @app.while_serving
    async def lifespan() -> AsyncGenerator[None, None]:
        background = await _start(proxy)
        yield
        await background.close()
        proxy.listener.close()
        await proxy.upstream.close()

    return app


async def _start(proxy: Proxy) -> Background:
    """Starts the tasks; the listener's sockets are open already, as a port in use must end the start in one line."""
    background = Background()
    await proxy.upstream.open()
    for socket, encrypted in proxy.listener.sockets:
        background.start("heartbeats", partial(proxy.listener.run, socket, encrypted))
    background.start("prober", proxy.prober.run)
    background.start("expiry", partial(_expire, proxy))
    background.start("settings", partial(proxy.settings.watch, partial(_reloaded, proxy)))
    if proxy.receipt_log is not None:
        background.start("receipt log", proxy.receipt_log.run)
    _apply(proxy)
    return background


async def _expire(proxy: Proxy) -> None:
    """Drops silent workers, and logs whatever has changed in the fleet since the last look."""
    registry, known = proxy.state.registry, dict[str, str]()
    while True:
        await asyncio.sleep(1.0)
        registry.expire(proxy.state.now(), proxy.settings.config.worker_ttl_s)
        states = {f"{view.name} {view.id}": view.state for view in registry.views()}
        for worker in known.keys() | states.keys():
            before, after = known.get(worker, "absent"), states.get(worker, "gone")
            if before != after:
                log.info("worker %s: %s", worker, after)
        known = states


def _reloaded(proxy: Proxy, taken: bool) -> None:
    proxy.state.metrics.config_reloads.labels("taken" if taken else "refused").inc()
    if taken:
        _apply(proxy)


def _apply(proxy: Proxy) -> None:
    """Makes the current settings' live keys effective: rules, and the static workers of the config."""
    proxy.router.rules = proxy.settings.rules()
    wanted = {worker.id: worker for worker in proxy.settings.config.static_workers}
    for view in proxy.state.registry.views():
        if view.worker.source is Source.STATIC and view.id not in wanted and view.id not in proxy.settings.added:
            proxy.state.registry.remove(view.id)
    for worker in wanted.values():
        proxy.state.registry.add_static(worker, proxy.state.now())
    proxy.prober.nudge()


def _turn_routes(app: Quart, proxy: Proxy) -> None:
    async def turn() -> Response:
        body = await _body()
        headers = lowered(request.headers)
        endpoint = Endpoint(request.path)
        receipt = _new_receipt(endpoint)
        try:
            forced = forced_route(headers, proxy.settings.config.admin_key)
            parsed = parse_request(
                endpoint,
                body,
                headers,
                tenant=tenant_of(headers),
                hasher=proxy.state.hasher,
                session_key=proxy.settings.config.session_key,
            )
            receipt.model, receipt.stream = parsed.model, parsed.stream
            legs = leg_headers(headers, proxy.settings.config.worker_api_key)
            legs["content-type"] = JSON  # it was read as JSON, whatever the client called it
            reply = await proxy.router.answer(parsed, receipt, legs, forced)
        except PPDError as exc:
            response = _error(exc)
            response.headers.update(decision_headers(receipt))
            return response
        return Response(reply.body, 200, reply.headers, content_type=reply.content_type)

    for endpoint in Endpoint:
        app.add_url_rule(endpoint.value, f"turn_{endpoint.name}", turn, methods=["POST"])


async def _body() -> bytes:
    data = await request.get_data(cache=False)
    assert isinstance(data, bytes), "asked for as bytes"
    return data


def _new_receipt(endpoint: Endpoint) -> Receipt:
    """The client's own request id is kept where it is harmless, so that its logs and ours can be joined."""
    given = request.headers.get("X-Request-Id", "")
    return Receipt(
        id=given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex,
        at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        endpoint=endpoint.value,
        model="",
        stream=False,
        session="",
        turn=0,
        kind="",
    )


def _passthrough_routes(app: Quart, proxy: Proxy) -> None:
    async def forward(name: str = "") -> Response:
        if name and not AUDIO.fullmatch(request.path):
            raise NotFound(f"no such path: {request.path}")
        body = await _body()
        target = request.path + ("?" + request.query_string.decode("latin1") if request.query_string else "")
        headers = leg_headers(lowered(request.headers), proxy.settings.config.worker_api_key)
        answer = await proxy.passthrough.forward(request.method, target, body, headers)
        proxy.state.metrics.passed_through.labels("/v1/audio" if name else request.path, str(answer.status)).inc()
        return Response(answer.chunks, answer.status, answer.headers)

    for endpoint in ENDPOINTS:
        app.add_url_rule(endpoint, f"forward_{endpoint}", forward, methods=["POST"])
    app.add_url_rule("/v1/audio/<path:name>", "forward_audio", forward, methods=["GET", "POST"])

    @app.get("/v1/models")
    async def models() -> Response:
        headers = leg_headers(lowered(request.headers), proxy.settings.config.worker_api_key)
        return Response(await proxy.passthrough.models(headers), content_type=JSON)


def _operator_routes(app: Quart, proxy: Proxy) -> None:
    @app.get("/health")
    async def health() -> Response:
        return Response("", 200)

    @app.get("/ready")
    async def ready() -> Response:
        ways = ways_to_serve(proxy.state.registry.views())
        return Response(msgspec.json.encode(ways), 200 if any(ways.values()) else 503, content_type=JSON)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(proxy.state.metrics.render(), content_type=CONTENT_TYPE_LATEST)


def _error_handlers(app: Quart) -> None:
    @app.errorhandler(PPDError)
    async def ours(exc: PPDError) -> Response:
        return _error(exc)

    @app.errorhandler(RequestEntityTooLarge)
    async def too_large(_: RequestEntityTooLarge) -> Response:
        return _error(BodyTooLarge(f"the body is larger than {app.config['MAX_CONTENT_LENGTH']} bytes"))

    @app.errorhandler(HTTPException)
    async def http(exc: HTTPException) -> Response:
        if exc.code == 404:
            return _error(NotFound(f"no such path: {request.path}"))
        error = RequestError(exc.description or exc.name)
        error.status = exc.code or 400
        return _error(error)

    @app.errorhandler(Exception)
    async def unexpected(exc: Exception) -> Response:
        # Its text may hold addresses: the client gets none of it.
        log.error("request failed", exc_info=exc)
        return _error(PPDError("internal error"))


def _error(exc: PPDError) -> Response:
    if isinstance(exc, WorkerRefused) and exc.is_openai_error:
        return Response(exc.body, exc.status, content_type=JSON)
    response = Response(error_body(exc.message, exc.kind, exc.code or exc.status, exc.param), exc.status)
    response.content_type = JSON
    return response
