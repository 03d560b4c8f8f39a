"""All that is no turn: it goes to the engine as it is, and the engine's answer comes back as it is.

Except for what would let a client steer a KV transfer: JSON objects lose the transfer members, as turns do, and the
token-level API is closed, whose bodies can hold them deeper.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST
from quart import Quart, Response, request

from ppd.proxy.admission.auth import HOPS, leg_headers, lowered
from ppd.proxy.admission.keys import Client
from ppd.proxy.app.request_body import whole_body
from ppd.proxy.bodies.body_reader import Body, BodyReader
from ppd.proxy.config import ProxyConfig
from ppd.proxy.connectors import stops_at_plain
from ppd.proxy.errors import LegError, NotFound, NoWorkerError, RequestError
from ppd.proxy.failures import Phase
from ppd.proxy.fleet.worker import Worker
from ppd.proxy.openai.form import is_form
from ppd.proxy.passthrough.passthrough import needs_model
from ppd.proxy.runtime.tasks import Drain, draining
from ppd.proxy.telemetry.merged_metrics import families, render
from ppd.proxy.telemetry.metrics import Metrics
from ppd.proxy.upstream.call import Answer, Call, Timeouts
from ppd.proxy.upstream.client import Upstream
from ppd.proxy.upstream.relayed_headers import HOP_BY_HOP, EndToEndHeaders

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
CLOSED = "/inference/v1/generate"
METRICS = "/ppd/metrics"
# Of this connection, written anew for the engine, about a body that was decoded here, or Quart's own.
_DROPPED = {name.decode() for name in HOP_BY_HOP} | {
    *("host", "expect", "accept-encoding", "user-agent", "content-encoding", "remote-addr")
}
_ANYBODY = Client(name="", tenant="")


class EngineRequests:
    """Forwards to one engine."""

    def __init__(self, config: ProxyConfig, upstream: Upstream, bodies: BodyReader, engine: Worker) -> None:
        self._config = config
        self._upstream = upstream
        self._bodies = bodies
        self._engine = engine
        self._timeouts = Timeouts(config.connect_timeout_s, config.answer_timeout_s, config.idle_timeout_s)

    def add_routes(self, app: Quart, drain: Drain, metrics: Metrics) -> None:
        """metrics: the sidecar's own; `/metrics` is the engine's."""

        async def own_metrics() -> Response:
            return Response(render(families(metrics.registry)), content_type=CONTENT_TYPE_LATEST)

        async def health() -> Response:
            """The engine's; 503 once the sidecar is about to stop, or where the engine does not answer."""
            if drain.is_announced:
                raise draining()
            try:
                return await self.forward()
            except LegError as exc:
                raise NoWorkerError("the engine does not answer") from exc

        async def forward(rest: str = "") -> Response:
            return await self.forward()

        app.add_url_rule("/health", "health", health, methods=["GET"])
        app.add_url_rule(METRICS, "metrics", own_metrics, methods=["GET"])
        for rule in ("/", "/<path:rest>"):
            app.add_url_rule(rule, f"forward {rule}", forward, methods=list(METHODS))

    async def forward(self) -> Response:
        """The engine's answer to the current request."""
        if request.path == CLOSED:
            raise NotFound(f"no such path: {CLOSED}")
        if needs_model(request.path) and stops_at_plain(self._engine):
            raise NoWorkerError("the engine computes nothing without a P")
        given = lowered(request.headers)
        headers = {name: value for name, value in given.items() if name not in _DROPPED}
        headers[HOPS] = leg_headers(given)[HOPS]
        content_type = given.get("content-type", "")
        body = await whole_body(self._config.idle_timeout_s, self._config.body_limit_bytes)
        if not is_form(content_type):
            _, body = await self._bodies.forwarded(content_type, body, _ANYBODY, request.path)
            if body:
                headers["content-type"] = "application/json"  # the engine must read it as it was read here
        answer = await self._ask(headers, body)
        task = asyncio.current_task()
        assert task is not None, "runs in the request's task"
        # The client may leave before the first chunk is asked for, when a generator's `finally` would never run.
        task.add_done_callback(lambda _: answer.close())
        content_type, relayed = answer.content_type, answer.relayed(EndToEndHeaders())
        relayed.pop("content-type", None)
        answer.reached_the_client()
        return Response(_chunks(answer), answer.status, relayed, content_type=content_type)

    async def _ask(self, headers: Mapping[str, str], body: Body) -> Answer:
        parts = (body,) if isinstance(body, bytes) else (body.view(),)
        # The answer to a HEAD has the length of a body that does not come; the client's server leaves a body out.
        method = "GET" if request.method == "HEAD" else request.method
        call = Call(self._engine)
        try:
            return await self._upstream.ask(
                call, _target(), method=method, body=parts, headers=headers, timeouts=self._timeouts
            )
        except LegError as exc:
            if exc.phase is Phase.CONNECT:
                raise NoWorkerError("the engine cannot be reached") from exc
            raise


def _target() -> str:
    """As it came: an escape that was read here would name another path."""
    path: str = request.scope["raw_path"].decode("latin-1")
    target = path + ("?" + request.query_string.decode("latin-1") if request.query_string else "")
    if not target.isascii() or not target.isprintable() or " " in target:  # it becomes a line of the engine's request
        raise RequestError("the request's target must be printable ASCII without spaces")
    return target


async def _chunks(answer: Answer) -> AsyncIterator[bytes]:
    while data := await answer.chunk():
        yield data
