"""The operator's API under /admin: workers, sessions, receipts and weights. Every route needs the admin key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec
from quart import Blueprint, Response, request

from ..admission.auth import check_admin, lowered
from ..assembly import Proxy
from ..config import ProxyConfig, convert
from ..connectors import missing_coordinates, reads_back
from ..errors import NotFound, RequestError
from ..fleet.ledger import backlog
from ..fleet.view import NEVER_S, WorkerView
from ..fleet.worker import PREFIX_CACHE, Source, WorkerId
from ..laws.worker_laws import WorkerLaws
from ..policy import Limits
from ..sessions.session import SessionSummary
from .peer_commands import Add, Remove, SetDraining, find_receipt, find_worker, newest_receipts, send_command
from .request_body import whole_body

T = TypeVar("T")
BODY_LIMIT_S = 30.0
BODY_LIMIT_BYTES = 64 * 1024
TARGETS = ("slo_ttft_s", "slo_ttft_factor", "slo_tpot_s")
CHANGEABLE = (
    *("mode", "order", "x", "w_ttft", "w_tpot", *TARGETS, "lookup", "uncovered", "table"),
    *Limits.__struct_fields__,
)


class WorkerCall(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /admin/workers: a worker in the config's own notation."""

    worker: str


class DrainCall(msgspec.Struct, forbid_unknown_fields=True):
    """Body of PATCH /admin/workers/{id}."""

    draining: bool


def admin_routes(proxy: Proxy) -> Blueprint:
    routes = Blueprint("admin", __name__, url_prefix="/admin")

    @routes.before_request
    async def authenticate() -> None:
        check_admin(lowered(request.headers), proxy.settings.config.admin_key)

    _worker_routes(routes, proxy)
    _record_routes(routes, proxy)
    _law_routes(routes, proxy)

    @routes.get("/weights")
    async def weights() -> Response:
        return _json(_weights(proxy.settings.config))

    @routes.put("/weights")
    async def change_weights() -> Response:
        changes = await _body(dict[str, object])
        for name in changes:
            if name not in CHANGEABLE:
                raise RequestError(f"{name}: can't be changed; {', '.join(CHANGEABLE)} can", param=name)
        await proxy.membership.ask_leader("weights", msgspec.msgpack.encode(convert(changes)))
        return _json(_weights(proxy.settings.config))

    return routes


def _worker_routes(routes: Blueprint, proxy: Proxy) -> None:
    registry = proxy.state.registry

    @routes.get("/workers")
    async def workers() -> Response:
        now_s = proxy.state.now()
        return _json({"workers": [_worker(view, now_s) for view in registry.views()]})

    @routes.post("/workers")
    async def add() -> Response:
        return _json({"id": await send_command(proxy, Add((await _body(WorkerCall)).worker))}, 201)

    @routes.patch("/workers/<worker_id>")
    async def drain(worker_id: str) -> Response:
        drained = await send_command(proxy, SetDraining(worker_id, (await _body(DrainCall)).draining))
        return _json(_worker(find_worker(proxy, drained), proxy.state.now()))

    @routes.delete("/workers/<worker_id>")
    async def remove(worker_id: str) -> Response:
        return _json({"id": await send_command(proxy, Remove(worker_id))})


def _record_routes(routes: Blueprint, proxy: Proxy) -> None:
    @routes.get("/sessions")
    async def sessions() -> Response:
        newest = [_session(proxy, summary) for summary in proxy.state.sessions.recent(_limit())]
        return _json({"count": len(proxy.state.sessions), "newest": newest})

    @routes.get("/sessions/<session_id>")
    async def session(session_id: str) -> Response:
        found = proxy.state.sessions.summary(session_id)
        if found is None:
            raise NotFound(f"no session {session_id!r}", param="session_id")
        return _json(_session(proxy, found))

    @routes.delete("/sessions/<session_id>")
    async def forget(session_id: str) -> Response:
        proxy.state.sessions.drop(session_id)
        proxy.membership.session_dropped(session_id)
        return _json({"id": session_id})

    @routes.get("/requests")
    async def receipts() -> Response:
        return _json({"newest": await newest_receipts(proxy, _limit())})

    @routes.get("/requests/<request_id>")
    async def receipt(request_id: str) -> Response:
        found = await find_receipt(proxy, request_id)
        if found is None:
            raise NotFound(f"no receipt for request {request_id!r}: only the newest are kept", param="request_id")
        return _json(found)


def _law_routes(routes: Blueprint, proxy: Proxy) -> None:
    laws, registry = proxy.state.laws, proxy.state.registry

    @routes.get("/laws")
    async def corrections() -> Response:
        return _json(_laws(laws, registry.views()))

    @routes.post("/laws/reset")
    async def reset() -> Response:
        laws.reset()
        return _json(_laws(laws, registry.views()))


def _laws(laws: WorkerLaws, views: Iterable[WorkerView]) -> dict[str, object]:
    """What turns have taught of the workers that have a profile, and how well predictions hold."""
    known = [(view, found, laws.shown(view)) for view in views if (found := laws.of(view)) is not None]
    return {
        "version": laws.version,
        "workers": [
            {"id": view.id, "name": view.name, "role": view.role, "profile": found.profile, **shown}
            for view, found, shown in known
        ],
        "judged": list(laws.judged()),
        "turns_beyond_range": laws.guesses,
    }


def _limit() -> int:
    text = request.args.get("limit", "50")
    if not (text.isdecimal() and len(text) <= 4 and 1 <= int(text) <= 1000):
        raise RequestError(f"limit = {text!r}: must be a whole number from 1 to 1000", param="limit")
    return int(text)


async def _body(kind: type[T]) -> T:
    try:
        body = await whole_body(BODY_LIMIT_S, BODY_LIMIT_BYTES)
        assert isinstance(body, bytes), "a small one"
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise RequestError(f"body: {exc}") from exc


def _weights(config: ProxyConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in CHANGEABLE}


def _session(proxy: Proxy, summary: SessionSummary) -> dict[str, object]:
    return {
        "session_id": summary.session_id,
        "turn": summary.turn,
        "held_tokens": summary.held_tokens,
        "decode": _name(proxy, summary.decode),
        "prefill": _name(proxy, summary.prefill),
        "idle_s": round(proxy.state.now() - summary.seen_s, 1),
    }


def _name(proxy: Proxy, worker: WorkerId | None) -> str | None:
    """Of one that has left, its address."""
    view = None if worker is None else proxy.state.registry.view(worker)
    return worker if view is None else view.name


def _worker(view: WorkerView, now_s: float) -> dict[str, object]:
    worker, load = view.worker, view.load
    return {
        "id": view.id,
        "name": view.name,
        "role": worker.role,
        "state": view.state,
        "models": worker.models,
        "engine": worker.engine,
        "engine_version": worker.engine_version,
        "connector": worker.connector,
        "missing_coordinates": missing_coordinates(worker),
        "keeps_prefixes": worker.keeps_prefixes if PREFIX_CACHE in worker.coordinates else None,
        "reads_back": reads_back(worker),
        "takes_plain": worker.takes_plain,
        "source": worker.source,
        "x": worker.x,
        "profile": worker.profile,
        "labels": worker.labels,
        "sidecar": worker.has_sidecar,
        "incarnation": view.incarnation,
        "silent_s": round(now_s - view.heard_s, 1) if worker.source is not Source.STATIC else None,
        "running": load.running,
        "waiting": load.waiting,
        "kv_usage": load.kv_usage,
        "kv_capacity_tokens": load.kv_capacity_tokens,
        "report_age_s": round(now_s - view.reported_s, 1) if view.reported_s > NEVER_S else None,
        "inflight": view.inflight,
        "queued_prefill_tokens": view.queued_prefill_tokens,
        **msgspec.structs.asdict(backlog(view, now_s)),
    }


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, content_type="application/json")
