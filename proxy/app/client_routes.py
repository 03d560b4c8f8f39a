"""The Quart application: the routes, the errors, and the life of the background tasks."""

from __future__ import annotations

import asyncio
import logging
import re
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
from ..fleet.worker import Source, WorkerId
from ..openai.request import Endpoint
from ..policy.placement import ways_to_serve
from ..routing.passthrough import AUDIO, ENDPOINTS
from ..routing.router import TurnReply
from ..routing.service import JSON, error_reply
from ..runtime.tasks import Background
from ..telemetry.merged_metrics import render
from . import peer_commands
from .admin_routes import admin_routes
from .openapi import render as render_openapi
from .peer_commands import obey
from .request_body import whole_body

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
UNHEARD_S = (
    8.0  # with 5 s to connect and three probes of 5 s, a leg is given up before its handoff's lease of 30 s ends
)


def create_app(proxy: Proxy) -> Quart:
    app = Quart(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = proxy.settings.config.body_limit_bytes
    app.config["BODY_TIMEOUT"] = None  # `bodies` has its own
    app.config["RESPONSE_TIMEOUT"] = None  # a stream may last; each read of it has its own time-out
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    app.url_map.merge_slashes = False  # a redirect would name the client's own Host
    proxy.membership.handlers |= {
        "workers": partial(obey, proxy),
        "receipt": partial(peer_commands.one, proxy.state.receipts),
        "receipts": partial(peer_commands.some, proxy.state.receipts),
    }

    @app.before_request
    async def hear() -> None:
        proxy.membership.catch_up()

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
        await proxy.membership.close()
        await proxy.winding_up.close()
        proxy.listener.close()
        await proxy.upstream.close()
        await proxy.prober.close()

    return app


async def _start(proxy: Proxy) -> Background:
    """Starts the tasks; the listener's sockets are open already, as a port in use must end the start in one line."""
    background = Background()
    for socket, encrypted in proxy.listener.sockets:
        background.start("heartbeats", partial(proxy.listener.run, socket, encrypted))
    if proxy.membership.leads:
        background.start("prober", proxy.prober.run)
        background.start("canary", proxy.canary.run)
    background.start("siblings", proxy.membership.run)
    if proxy.settings.config.spare_connections:
        background.start("spare connections", partial(_keep_warm, proxy))
    background.start("drain", partial(_close_down, proxy))
    if proxy.keys is not None:
        background.start("keys", partial(proxy.keys.watch, partial(_count_reload, proxy)))
    background.start("certificates", proxy.tls.watch)
    background.start("expiry", partial(_expire, proxy, _pictures(proxy)))
    background.start("settings", partial(proxy.settings.watch, partial(_reloaded, proxy)))
    if proxy.receipt_log is not None:
        background.start("receipt log", proxy.receipt_log.run)
    _apply(proxy)
    return background


async def _keep_warm(proxy: Proxy) -> None:
    """Connections to all workers that may be asked, before a turn needs one."""
    config, registry = proxy.settings.config, proxy.state.registry
    while True:
        workers = [view.worker for view in registry.views() if view.state == "up"]
        await proxy.upstream.warm(workers, config.spare_connections, config.connect_timeout_s)
        await asyncio.sleep(1.0)


def _pictures(proxy: Proxy) -> dict[WorkerId, tuple[str, str, str]]:
    """Of each worker what `_expire` watches."""
    return {view.id: (view.name, view.state, view.incarnation) for view in proxy.state.registry.views()}


async def _expire(proxy: Proxy, known: dict[WorkerId, tuple[str, str, str]]) -> None:
    """Drops silent workers, and notes and logs whatever has changed in the fleet since the last look.

    Of several processes the leader alone drops and logs. known: what the others knew when this one began.
    """
    registry = proxy.state.registry
    while True:
        await asyncio.sleep(1.0)
        if proxy.membership.leads:
            for view in registry.expire(proxy.state.now(), proxy.settings.config.worker_ttl_s):
                proxy.prober.doubt(view)
        for worker in proxy.upstream.unheard(UNHEARD_S):
            if (silent := registry.view(worker)) is not None:
                proxy.prober.doubt(silent)
        seen = _pictures(proxy)
        for worker in known.keys() | seen.keys():
            before, after = known.get(worker), seen.get(worker)
            if before == after:
                continue
            is_other = after is None or before is None or before[1] == "down" or before[2] != after[2]
            if is_other and proxy.membership.leads:
                proxy.state.health.forget(worker)  # what came is not what had failed
            name, state, _ = after or before or ("", "", "")
            level = logging.INFO if proxy.membership.leads else logging.DEBUG
            log.log(level, "worker %s %s: %s", name, worker, state if after else "gone")
        known = seen
        proxy.state.admission.poke()  # a worker may have come, or come back


async def _close_down(proxy: Proxy) -> None:
    """Nobody waits for a place in a proxy that is about to end."""
    await proxy.drain.wait()
    proxy.state.admission.close_down()


def _count_reload(proxy: Proxy, taken: bool) -> None:
    proxy.state.metrics.config_reloads.labels("taken" if taken else "refused").inc()


def _reloaded(proxy: Proxy, taken: bool) -> None:
    _count_reload(proxy, taken)
    if taken:
        _apply(proxy)


def _apply(proxy: Proxy) -> None:
    """Makes the current settings' live keys effective: rules, and the static workers of the config."""
    proxy.router.rules = proxy.settings.rules()
    if not proxy.membership.leads:
        return  # it hears of them
    wanted = {worker.id: worker for worker in proxy.settings.static_workers}
    for view in proxy.state.registry.views():
        if view.worker.source is Source.STATIC and view.id not in wanted and view.id not in proxy.settings.added:
            proxy.state.registry.remove(view.id)
    for worker in wanted.values():
        proxy.state.registry.add_static(worker, proxy.state.now())
    proxy.prober.nudge()


def _turn_routes(app: Quart, proxy: Proxy) -> None:
    async def turn() -> Response:
        caller = proxy.turns.caller(Endpoint(request.path), lowered(request.headers))
        body = await whole_body(proxy.settings.config.idle_timeout_s)
        return _response(await proxy.turns.answer(caller, body))

    for endpoint in Endpoint:
        app.add_url_rule(endpoint.value, f"turn_{endpoint.name}", turn, methods=["POST"])


def _response(reply: TurnReply) -> Response:
    return Response(_body(reply), reply.status, reply.headers, content_type=reply.content_type)


def _body(reply: TurnReply) -> bytes | AsyncGenerator[bytes, None]:
    """What Quart sends."""
    body = reply.body
    if isinstance(body, bytes):
        return body
    task = asyncio.current_task()
    assert task is not None, "runs in the request's task"
    # The client may leave before a stream is first read, when a generator's `finally` would never run.
    task.add_done_callback(lambda _: body.abandon())
    return body.chunks()


def _passthrough_routes(app: Quart, proxy: Proxy) -> None:
    def asking() -> tuple[Client, dict[str, str]]:
        headers = lowered(request.headers)
        client = authenticate(headers, proxy.keys)
        return client, leg_headers(headers, proxy.settings.config.worker_api_key, forwards_key=proxy.keys is None)

    async def forward(name: str = "") -> Response:
        if name and not AUDIO.fullmatch(request.path):
            raise NotFound(f"no such path: {request.path}")
        client, headers = asking()
        body = await whole_body(proxy.settings.config.idle_timeout_s)
        target = request.path + ("?" + request.query_string.decode("latin1") if request.query_string else "")
        answer = await proxy.passthrough.forward(request.method, target, body, headers, client)
        proxy.state.metrics.passed_through.labels("/v1/audio" if name else request.path, str(answer.status)).inc()
        return Response(answer.chunks, answer.status, answer.headers)

    for endpoint in ENDPOINTS:
        app.add_url_rule(endpoint, f"forward_{endpoint}", forward, methods=["POST"])
    app.add_url_rule("/v1/audio/<path:name>", "forward_audio", forward, methods=["GET", "POST"])

    @app.get("/v1/models")
    async def models() -> Response:
        client, headers = asking()
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
        # Its text may hold addresses: the client gets none of it.
        log.error("request failed", exc_info=exc)
        return _refused(PPDError("internal error"))


def _refused(exc: PPDError) -> Response:
    return _response(error_reply(exc))
