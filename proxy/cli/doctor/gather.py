"""Gathers `ppd doctor`'s facts: about a config and this machine, a running proxy, and the workers of either.

Only this file of the doctor uses sockets and files. Every await has a time-out. Nothing here raises when a question
fails: that is a fact too.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from ...config import Draft, ProxyConfig, all_of, notices
from ...connectors import CONNECTORS
from ...connectors.nixl import READS_BACK
from ...connectors.queries import query_of
from ...decision_table.score import Weights
from ...decision_table.table import DecisionTable, find
from ...discovery.heartbeat_listener import curve_keys
from ...downstream.serve import bind_error
from ...errors import ConfigError, PPDError
from ...fleet.engine_metrics import PEER_FAILURES, metrics_path
from ...fleet.worker import PREFIX_CACHE, TAKES_PLAIN, Role, Worker
from ...health.probe import EngineStatus, probe, reason_of
from ...plane import IS_BUILT
from ...runtime.tls import worker_tls
from ...settings import workers_of
from ..config_check import PARTS, check_config_table, check_curve_keys, problems
from ..table_view import CellCounts
from .values import ConfigFact, DataPlaneFact, EngineCounts, Facts, LawsFact, PortFact, ProxyFact, WorkerFact

ASK_S = 5.0  # for one small answer
_CHECKED = tuple(part for part in PARTS if part not in (check_curve_keys, check_config_table))  # findings of their own


@dataclass(frozen=True, slots=True)
class Said:
    """An HTTP answer; if there was none, status 0 and an error."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    error: str = ""
    is_late: bool = False  # there was none in time

    def json(self) -> Any:
        """{} if the body is not a JSON object."""
        try:
            value = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return {}
        return value if isinstance(value, dict) else {}


class ProxyClient:
    """Requests to one proxy. The keys are sent to it alone."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, admin_key: str, client_key: str) -> None:
        self.address = url.partition("://")[2].rpartition("@")[2]
        self._session = session
        self._url = url
        self._admin = {"X-Admin-Key": admin_key} if admin_key else {}
        self._client = {"Authorization": f"Bearer {client_key}"} if client_key else {}

    async def operator(self, path: str) -> Said:
        return await self._ask("GET", path, self._admin, None, ASK_S)

    async def client(
        self, path: str, body: object = None, *, session_id: str = "", forced: str = "", timeout_s: float = ASK_S
    ) -> Said:
        """A request as a client sends it: GET without a body, else POST. forced: a route, by the admin key."""
        headers = self._client | ({"X-Session-ID": session_id} if session_id else {})
        if forced:
            headers |= {**self._admin, "X-PPD-Force-Route": forced}
        data = None if body is None else msgspec.json.encode(body)
        return await self._ask("GET" if data is None else "POST", path, headers, data, timeout_s)

    async def _ask(self, method: str, path: str, headers: dict[str, str], data: bytes | None, timeout_s: float) -> Said:
        if data is not None:
            headers = {**headers, "Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, self._url + path, headers=headers, data=data, allow_redirects=False
                ) as answer,
            ):
                headers = {name.lower(): value for name, value in answer.headers.items()}
                return Said(answer.status, await answer.read(), headers)
        except TimeoutError:
            return Said(0, error=f"no answer in {timeout_s:g} s", is_late=True)
        except (aiohttp.ClientError, OSError) as exc:
            return Said(0, error=reason_of(exc, timeout_s))
        except ValueError as exc:  # of a host that no name can be, or of a key that no header can hold
            return Said(0, error=f"it cannot be asked: {exc}")


# -- a config


async def facts_of_config(session: aiohttp.ClientSession, path: Path, flags: Mapping[str, object]) -> Facts:
    try:
        draft = Draft.read(path, flags)
        if errors := [*draft.errors, *problems(draft.config, _CHECKED)]:
            raise all_of(errors)
        config = draft.config
        named, tls = _named(workers_of(config)), worker_tls(config).context
    except PPDError as exc:
        return Facts(config_error=str(exc))
    workers = await look_at(session, named, api_key=config.worker_api_key, tls=tls)
    return Facts(config=_config_fact(config), workers=workers)


def _named(workers: Iterable[Worker]) -> list[WorkerFact]:
    """The workers with the names that the proxy would give them."""
    counts = dict.fromkeys(Role, 0)
    facts = []
    for worker in workers:
        counts[worker.role] += 1
        facts.append(WorkerFact(name=f"{worker.role}{counts[worker.role]}", worker=worker))
    return facts


def _config_fact(config: ProxyConfig) -> ConfigFact:
    ports = [
        PortFact("port", config.host, config.port),
        PortFact("heartbeat_port", config.heartbeat_host, config.heartbeat_port),
    ]
    if config.curve_port:
        ports.append(PortFact("curve_port", config.heartbeat_host, config.curve_port))
    cells, table_error = _table(config)
    return ConfigFact(
        notices=tuple(notices(config)),
        ports=tuple(replace(port, error=_bind_error(port.host, port.port)) for port in ports),
        mode=config.mode,
        prefills_answer=config.prefills_answer,
        table=config.table,
        table_cells=cells,
        table_error=table_error,
        heartbeat_host=config.heartbeat_host,
        heartbeat_port=config.heartbeat_port,
        has_allow_list=bool(config.heartbeat_allow),
        has_curve=bool(config.curve_port),
        curve_error=_curve_error(config),
        has_admin_key=bool(config.admin_key),
        data_plane=DataPlaneFact(config.data_plane.serving(IS_BUILT), config.data_plane, IS_BUILT),
    )


def _bind_error(host: str, port: int) -> str:
    """Why the port can't be bound; empty if it can."""
    error = bind_error(host, port)
    return "" if error is None else error.strerror or type(error).__name__


def _table(config: ProxyConfig) -> tuple[int, str]:
    """Number of cells with evidence, and why the table can't be loaded."""
    try:
        table = DecisionTable.load(find(config.table))
    except (PPDError, OSError) as exc:
        return 0, str(exc)
    return CellCounts.of(table.scored(Weights(config.w_ttft, config.w_tpot))).evidence, ""


def _curve_error(config: ProxyConfig) -> str:
    if not config.curve_port:
        return ""
    try:
        curve_keys(config)
    except ConfigError as exc:
        return exc.message
    return ""


# -- a running proxy


async def facts_of_proxy(session: aiohttp.ClientSession, proxy: ProxyClient) -> Facts:
    health = await proxy.operator("/health")
    if health.status != 200:
        error = health.error or f"/health answered {health.status}"
        return Facts(proxy=ProxyFact(address=proxy.address, error=error))
    paths = ("/ready", "/admin/workers", "/admin/weights", "/admin/laws", "/metrics")
    ready, admin, weights, laws, metrics = await asyncio.gather(*map(proxy.operator, paths))
    listed = _listed(admin)
    fact = ProxyFact(
        address=proxy.address,
        error=_stranger(ready, listed),
        ready_status=ready.status,
        ways=tuple(way for way, is_there in ready.json().items() if is_there is True),
        admin_status=admin.status,
        mode=str(weights.json().get("mode", "")),
        data_planes=tuple(data_planes(metrics)),
        laws=tuple((judged := _judged(laws)).judged),
        turns_beyond_range=judged.turns_beyond_range,
    )
    return Facts(proxy=fact, workers=await look_at(session, listed or (), api_key=""))


def _stranger(ready: Said, listed: list[WorkerFact] | None) -> str:
    """By what it is seen that this is no proxy; empty if it may be one."""
    if ready.status == 404:
        return "it has no /ready: an engine, or another server"
    return "" if listed is not None else "its /admin/workers is not a PPD proxy's"


class _Listed(msgspec.Struct):
    """A worker in the answer of /admin/workers."""

    id: str
    name: str
    role: Role
    state: str
    models: tuple[str, ...]
    engine: str
    engine_version: str
    connector: str
    missing_coordinates: tuple[str, ...] = ()  # as of an older proxy
    keeps_prefixes: bool | None = None  # as far as it has told; as of an older proxy
    reads_back: bool = False
    takes_plain: bool = False


class _Workers(msgspec.Struct):
    workers: list[_Listed]


class _Judged(msgspec.Struct):
    """Of the answer of /admin/laws."""

    judged: list[LawsFact] = []
    turns_beyond_range: dict[str, int] = {}


def _judged(laws: Said) -> _Judged:
    """Nothing where the answer can't be read, as of an older proxy."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        if laws.status == 200:
            return msgspec.json.decode(laws.body, type=_Judged)
    return _Judged()


def data_planes(metrics: Said) -> Iterator[DataPlaneFact]:
    """Nothing where the answer can't be read, as of an older proxy."""
    lines = metrics.body.decode(errors="replace").splitlines() if metrics.status == 200 else []
    with contextlib.suppress(ValueError, KeyError):
        told = "\n".join(line for line in lines if line.startswith("ppd_data_plane_info{"))
        for sample in (sample for family in text_string_to_metric_families(told) for sample in family.samples):
            labels = sample.labels
            yield DataPlaneFact(labels["plane"], labels["configured"], labels["built"] == "yes")


def _listed(admin: Said) -> list[WorkerFact] | None:
    """None if the answer can't be read."""
    if admin.status != 200:
        return []
    try:
        listed = msgspec.json.decode(admin.body, type=_Workers).workers
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return [
        WorkerFact(
            name=entry.name,
            state=entry.state,
            worker=Worker(
                role=entry.role,
                address=entry.id,
                models=entry.models,
                engine=entry.engine,
                engine_version=entry.engine_version,
                connector=entry.connector,
                coordinates=_told_coordinates(entry),
            ),
        )
        for entry in listed
    ]


def _told_coordinates(entry: _Listed) -> dict[str, str]:
    """Those that are not said to be missing; the admin API hides the values of most."""
    known = CONNECTORS[entry.connector].coordinates if entry.connector in CONNECTORS else ()
    seen = {} if entry.keeps_prefixes is None else {PREFIX_CACHE: str(entry.keeps_prefixes).lower()}
    seen |= {READS_BACK: "true"} if entry.reads_back else {}
    seen |= {TAKES_PLAIN: "true"} if entry.takes_plain else {}
    hidden = set(known) - {PREFIX_CACHE, READS_BACK, TAKES_PLAIN, *entry.missing_coordinates}
    return dict.fromkeys(hidden, "") | seen


# -- workers, as seen from here


async def look_at(
    session: aiohttp.ClientSession, workers: Iterable[WorkerFact], *, api_key: str, tls: ssl.SSLContext | None = None
) -> tuple[WorkerFact, ...]:
    return tuple(await asyncio.gather(*(_look(session, fact, api_key, tls) for fact in workers)))


async def _look(
    session: aiohttp.ClientSession, fact: WorkerFact, api_key: str, tls: ssl.SSLContext | None
) -> WorkerFact:
    worker = fact.worker
    asked, metrics = query_of(worker), metrics_path(worker.engine)
    status = await probe(session, worker.base_url, api_key=api_key, tls=tls, query=asked, metrics_path=metrics)
    if status.healthy:
        return seen(fact, status)
    answers = await _answers(session, fact.worker.base_url, tls)
    return replace(fact, healthy=False, reachable=answers, why=status.why, wants_key=status.wants_key)


async def _answers(session: aiohttp.ClientSession, base_url: str, tls: ssl.SSLContext | None) -> bool:
    """Whether an HTTP server answers, with any status."""
    try:
        async with asyncio.timeout(ASK_S), session.get(f"{base_url}/health", ssl=tls or True):
            return True
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


def seen(fact: WorkerFact, status: EngineStatus) -> WorkerFact:
    """A healthy worker's fact; its own answers replace what the config or the proxy says."""
    worker, metrics = fact.worker, status.metrics
    return replace(
        fact,
        worker=replace(
            worker,
            models=status.models or worker.models,
            engine_version=status.version or worker.engine_version,
            coordinates={**worker.coordinates, **status.coordinates},
        ),
        reachable=True,
        healthy=True,
        wants_key=status.wants_key,
        prefix_caching=metrics.prefix_caching,
        load=metrics.load if metrics.counters else None,
        counts=counts_of(metrics.counters) if metrics.counters else None,
    )


def counts_of(counters: Mapping[str, float]) -> EngineCounts:
    """Newer engines count prompt tokens by source; older ones count only their cache hits."""

    def first(*names: str) -> int | None:
        return next((int(counters[name]) for name in names if math.isfinite(counters.get(name, math.nan))), None)

    return EngineCounts(
        computed=first("local_compute"),
        local_hits=first("local_cache_hit", "vllm:prefix_cache_hits_total"),
        transferred=first("external_kv_transfer", "vllm:external_prefix_cache_hits_total"),
        expired=first("vllm:nixl_num_kv_expired_reqs_total"),
        failed=first("vllm:nixl_num_failed_transfers_total", PEER_FAILURES),
    )
