"""The Quart application: its routes for clients and for monitoring, and its error responses."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed, RequestEntityTooLarge

from ..admission.auth import authenticate, check_operator_path, leg_headers, lowered
from ..admission.keys import Client
from ..admission.web_pages import Origins, check_is_json
from ..assembly import Proxy
from ..config import Mode, ProxyConfig
from ..connectors.prefill import engine_version
from ..errors import BodyTooLarge, NotFound, NoWorkerError, PPDError, RequestError
from ..fleet.worker import WorkerId
from ..openai.request import Endpoint
from ..passthrough.passthrough import AUDIO, ENDPOINTS, ONLY
from ..policy.placement import ways_to_serve
from ..routing.router import TurnReply
from ..routing.service import JSON, TurnService, error_reply
from ..telemetry.access_log import RECORD, AccessRecord
from ..telemetry.merged_metrics import render
from .admin_routes import admin_routes
from .lifespan import close, start
from .openapi import render as render_openapi
from .peer_commands import answer_receipt, answer_receipts, change_weights, run_command
from .request_body import whole_body

log = logging.getLogger(__name__)

UNDER_WAY = ("ppd_inflight_turns", "ppd_queued_turns")
LAG_LIMIT_S = 5.0  # a process whose loop stood still for this long is not ready, until it has run on for a while


def create_app(proxy: Proxy) -> Quart:
    app = turn_app(proxy.settings.config, proxy.turns)
    proxy.membership.handlers |= {
        "workers": partial(run_command, proxy),
        "weights": partial(change_weights, proxy),
        "receipt": partial(answer_receipt, proxy.state.receipts),
        "receipts": partial(answer_receipts, proxy.state.receipts),
    }

    @app.before_request
    async def catch_up() -> None:
        proxy.membership.catch_up()

    _passthrough_routes(app, proxy)
    _engine_routes(app, proxy)
    _operator_routes(app, proxy)
    app.register_blueprint(admin_routes(proxy))

    @app.while_serving
    async def lifespan() -> AsyncGenerator[None, None]:
        background = start(proxy)
        yield
        await close(proxy, background)

    return app


def turn_app(config: ProxyConfig, turns: TurnService) -> Quart:
    """Answers turns, and whatever else with an error of ours; further routes may follow."""
    app = Quart(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = config.body_limit_bytes
    app.config["BODY_TIMEOUT"] = None  # `whole_body` has its own
    app.config["RESPONSE_TIMEOUT"] = None  # a stream may take long; each read from its worker has a time-out
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    app.url_map.merge_slashes = False  # a redirect would name the client's own Host

    async def turn() -> Response:
        try:
            caller = turns.caller(Endpoint(request.path), lowered(request.headers))
            if (record := _record()) is not None:
                record.receipt = caller.receipt
            body = await whole_body(config.idle_timeout_s, config.body_limit_bytes)
        except (PPDError, RequestEntityTooLarge) as exc:
            turns.rejected(_status(exc))
            raise
        reply = await turns.answer(caller, body)
        reply.written()  # how long the server takes to write it is not known here
        return _response(reply)

    for endpoint in Endpoint:
        app.add_url_rule(endpoint.value, f"turn_{endpoint.name}", turn, methods=["POST"])
    _error_handlers(app)
    return app


def _status(exc: PPDError | RequestEntityTooLarge) -> int:
    return exc.status if isinstance(exc, PPDError) else BodyTooLarge.status


def _record() -> AccessRecord | None:
    record: AccessRecord | None = request.scope.get("state", {}).get(RECORD)
    return record


def _only() -> frozenset[WorkerId] | None:
    only: frozenset[WorkerId] | None = request.scope.get("state", {}).get(ONLY)
    return only


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


def _authenticated(proxy: Proxy) -> tuple[Client, dict[str, str]]:
    """The client, and the headers that a worker gets of its request."""
    headers = lowered(request.headers)
    client = authenticate(headers, proxy.files.keys)
    if (record := _record()) is not None:
        record.client = client.name
    has_own = bool(proxy.settings.config.worker_api_key)
    return client, leg_headers(headers, forwards_key=proxy.files.keys is None and not has_own, scope=client.scope)


def _passthrough_routes(app: Quart, proxy: Proxy) -> None:
    config = proxy.settings.config
    origins = Origins(config.cors_allow_origins)

    async def forward(name: str = "") -> Response:
        if name and not AUDIO.fullmatch(request.path):
            raise NotFound(f"no such path: {request.path}")
        with _counted(proxy, "/v1/audio" if name else request.path) as count:
            client, headers = _authenticated(proxy)
            if name and request.method == "POST":
                origins.check_form(lowered(request.headers))
            elif request.method == "POST":
                check_is_json(headers)
            body = await whole_body(config.idle_timeout_s, config.body_limit_bytes)
            answer = await proxy.passthrough.within(_only()).forward(request.method, _target(), body, headers, client)
            if (record := _record()) is not None:
                record.model, record.worker = answer.model, answer.worker
            count(answer.status)
        return Response(answer.chunks, answer.status, answer.headers)

    async def stored(response_id: str) -> Response:
        name = "/v1/responses/{response_id}" + ("/cancel" if request.method == "POST" else "")
        with _counted(proxy, name) as count:
            client, headers = _authenticated(proxy)
            await whole_body(config.idle_timeout_s, config.body_limit_bytes)  # which says nothing
            answer = await proxy.stored_responses.within(_only()).forward(
                request.method, _target(), response_id, headers, client
            )
            count(answer.status)
        return Response(answer.chunks, answer.status, answer.headers)

    app.add_url_rule("/v1/responses/<response_id>", "stored_response", stored, methods=["GET"])
    app.add_url_rule("/v1/responses/<response_id>/cancel", "cancel_response", stored, methods=["POST"])
    for endpoint in ENDPOINTS:
        app.add_url_rule(endpoint, f"forward_{endpoint}", forward, methods=["POST"])
    app.add_url_rule("/v1/audio/<path:name>", "forward_audio", forward, methods=["GET", "POST"])


@contextmanager
def _counted(proxy: Proxy, endpoint: str) -> Iterator[Callable[[int], None]]:
    """Counts a request outside of sessions by the status that its client gets: the one told, or the error's."""

    def count(status: int) -> None:
        proxy.state.metrics.passed_through.labels(endpoint, str(status)).inc()

    try:
        yield count
    except (PPDError, RequestEntityTooLarge) as exc:
        count(_status(exc))
        raise


def _engine_routes(app: Quart, proxy: Proxy) -> None:
    """What engines say of themselves, said of the fleet."""

    @app.get("/v1/models")
    async def models() -> Response:
        client, headers = _authenticated(proxy)
        return Response(await proxy.model_list.models(headers, client), content_type=JSON)

    @app.get("/version")
    async def version() -> Response:
        """The oldest engine's, as that is what every worker can do."""
        _authenticated(proxy)
        versions = [view.worker.engine_version for view in proxy.state.registry.views()]
        oldest = min(filter(None, versions), key=_version_order, default=None)
        if oldest is None:
            raise NoWorkerError("no worker has told its version yet")
        return Response(msgspec.json.encode({"version": oldest}), content_type=JSON)

    @app.get("/load")
    async def load() -> Response:
        """Requests that are served or wait, in all processes; as in vLLM, without those that only ask for news."""
        _authenticated(proxy)
        counted = {family.name: family for family in await proxy.membership.total()}
        load = sum(sample.value for name in UNDER_WAY for sample in counted[name].samples)
        return Response(msgspec.json.encode({"server_load": int(load)}), content_type=JSON)


def _version_order(version: str) -> tuple[int, int]:
    return engine_version(version) or (sys.maxsize, 0)


def _target() -> str:
    return request.path + ("?" + request.query_string.decode("latin1") if request.query_string else "")


def _operator_routes(app: Quart, proxy: Proxy) -> None:
    config = proxy.settings.config

    def check(path: str = "") -> None:
        check_operator_path(lowered(request.headers), path or request.path, config.open_paths, config.admin_key)

    @app.get("/health")
    async def health() -> Response:
        check()
        return Response(msgspec.json.encode(_lag(proxy)), 200, content_type=JSON)

    @app.route("/ping", methods=["GET", "POST"])
    async def ping() -> Response:
        """SageMaker's name of the same."""
        check("/health")
        return Response("", 200)

    @app.get("/ready")
    async def ready() -> Response:
        check()
        told = {**_ways(proxy), **_lag(proxy)}
        return Response(msgspec.json.encode(told), 200 if is_ready(proxy) else 503, content_type=JSON)

    @app.get("/metrics")
    async def metrics() -> Response:
        check()
        return Response(render(await proxy.membership.total()), content_type=CONTENT_TYPE_LATEST)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(render_openapi(), content_type=JSON)


def is_ready(proxy: Proxy) -> bool:
    """Whether it takes turns: a worker can answer them, and the proxy neither ends nor stands still."""
    is_ending = proxy.drain.is_announced or proxy.state.admission.is_closed_down
    can_serve = any(_ways(proxy).values())
    return can_serve and not is_ending and proxy.loop_watch.lag_s() < LAG_LIMIT_S


def _ways(proxy: Proxy) -> dict[str, bool]:
    config = proxy.settings.config
    prefills_answer = config.prefills_answer and config.mode is not Mode.PROFILES
    return ways_to_serve(proxy.state.registry.views(), prefills_answer=prefills_answer)


def _lag(proxy: Proxy) -> dict[str, float]:
    return {"loop_lag_s": round(proxy.loop_watch.lag_s(), 3)}


def _error_handlers(app: Quart) -> None:
    @app.errorhandler(PPDError)
    async def ours(exc: PPDError) -> Response:
        return _refused(exc)

    @app.errorhandler(RequestEntityTooLarge)
    async def too_large(_: RequestEntityTooLarge) -> Response:
        return _refused(BodyTooLarge(f"the body is larger than {app.config['MAX_CONTENT_LENGTH']} bytes"))

    @app.errorhandler(MethodNotAllowed)
    async def other_method(exc: MethodNotAllowed) -> Response:
        methods = ", ".join(sorted(exc.valid_methods or ()))
        error = RequestError(f"{request.path} takes only {methods}")
        error.status = 405
        answer = _refused(error)
        answer.headers["Allow"] = methods  # RFC 9110 asks for it
        return answer

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
    return _response(error_reply(exc, request.path))
