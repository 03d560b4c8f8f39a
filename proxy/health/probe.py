"""One probe of an engine over HTTP: whether it is healthy, its models, its version and its load."""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

import aiohttp
import msgspec
from msgspec import Meta

from ..connectors.queries import Query
from ..errors import UNREADABLE
from ..fleet.engine_metrics import METRICS_PATH, EngineMetrics, parse_metrics
from ..runtime.loop_watch import time_limit
from ..runtime.process_limits import NO_FILES
from . import event_sources

TIMEOUT_S = 5.0
NOT_FOUND = 404
_TEXT_LIMIT_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """An engine's answers; the field of a question that it did not answer is empty."""

    healthy: bool
    models: tuple[str, ...] = ()
    version: str = ""
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    scraped: bool = False  # whether /metrics answered, so that `metrics` holds something
    refused: bool = False  # connection refused: the process is gone, not slow
    aliases: dict[str, str] = field(default_factory=dict)  # as of a `Worker`
    why: str = ""  # it is not healthy
    unasked: bool = False  # this process can open no more files, so nothing is known of the engine
    wants_key: bool = False  # a path answered 401 or 403
    coordinates: dict[str, str] = field(default_factory=dict)  # as of a `Worker`: what it said when it was asked
    event_sources: bytes | None = None  # its answer at that path, empty if it has none; None: not asked, or not known


class Card(msgspec.Struct):
    id: str
    root: str | None = None  # where the weights are; all names of one model have the same
    parent: str | None = None  # of an adapter: the model that it adapts


class _Models(msgspec.Struct):
    data: list[Card]


class _Version(msgspec.Struct):
    version: Annotated[str, Meta(pattern=r"^[\x21-\x7e]{0,256}\Z")]  # as in heartbeats


def probing_session() -> aiohttp.ClientSession:
    """A session for probes alone, so that no probe waits for a turn's connection; needs a running loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
    )


async def probe(
    session: aiohttp.ClientSession,
    base_url: str,
    *,
    api_key: str = "",
    tls: ssl.SSLContext | None = None,
    timeout_s: float = TIMEOUT_S,
    asks_events: bool = False,
    query: Query | None = None,
    metrics_path: str = METRICS_PATH,
) -> EngineStatus:
    """Never raises for what an engine does: one that can't be reached is not healthy. query: of its coordinates."""
    headers = {"X-PPD-Hops": "1"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    number, wants_key, why = None, False, ""  # number: of the system's error

    async def ask(path: str) -> bytes | None:
        nonlocal number, wants_key, why
        try:
            getting = session.get(base_url + path, headers=headers, ssl=tls or True)
            async with time_limit(timeout_s), getting as response:
                data = await _text(response)
                if response.status == 200:
                    return data
                if path == event_sources.PATH and response.status == NOT_FOUND:
                    return b""
                why, wants_key = f"{path} answered {response.status}", wants_key or response.status in (401, 403)
                return None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as exc:  # ValueError: no host name
            number, why = getattr(exc, "errno", None), reason_of(exc, timeout_s)
            return None

    if await ask("/health") is None:
        refused, unasked = number == errno.ECONNREFUSED, number in NO_FILES
        return EngineStatus(healthy=False, refused=refused, why=why, unasked=unasked, wants_key=wants_key)
    paths = ("/v1/models", "/version", metrics_path, *((event_sources.PATH,) if asks_events else ()))
    (models, version, metrics, *events), coordinates = await asyncio.gather(
        asyncio.gather(*map(ask, paths)), _coordinates(session, query, tls, timeout_s)
    )
    cards = _model_cards(models)
    return EngineStatus(
        healthy=True,
        models=tuple(card.id for card in cards),
        aliases=aliases_of(cards),
        version=_version(version),
        metrics=parse_metrics((metrics or b"").decode("utf-8", "replace")),
        scraped=metrics is not None,
        wants_key=wants_key,
        coordinates=coordinates,
        event_sources=events[0] if events else None,
    )


async def _coordinates(
    session: aiohttp.ClientSession, query: Query | None, tls: ssl.SSLContext | None, timeout_s: float
) -> dict[str, str]:
    """Empty where nothing is asked, or not answered. No key is sent there."""
    if query is None:
        return {}
    try:
        async with time_limit(timeout_s), session.get(query.url, ssl=tls or True) as response:
            return query.read(await _text(response)) if response.status == 200 else {}
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return {}


async def _text(response: aiohttp.ClientResponse) -> bytes:
    data = await response.content.read(_TEXT_LIMIT_BYTES)
    while chunk := await response.content.read(_TEXT_LIMIT_BYTES - len(data)):
        data += chunk
    return data


UNTRUSTED = "its certificate is not trusted"


def reason_of(exc: Exception, timeout_s: float) -> str:
    """The operating system's words where there are any; aiohttp's and asyncio's repeat the address."""
    if isinstance(exc, TimeoutError):
        return f"no answer in {timeout_s:g} s"
    if isinstance(exc, aiohttp.ClientConnectorCertificateError):
        return f"{UNTRUSTED}: {getattr(exc.certificate_error, 'verify_message', '') or 'not valid'}"
    error = getattr(exc, "os_error", exc)
    if isinstance(error, ssl.SSLError):
        return f"no TLS: {error.reason or type(error).__name__}"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:  # below: of names, not the system's
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or type(exc).__name__


def _model_cards(body: bytes | None) -> list[Card]:
    try:
        return msgspec.json.decode(body or b"", type=_Models).data
    except UNREADABLE:
        return []


def aliases_of(cards: Iterable[Card]) -> dict[str, str]:
    """Adapters have none: an engine keeps the KV of each by its name."""
    roots = dict[str, list[str]]()
    for card in cards:
        if card.root is not None and card.parent is None:
            roots.setdefault(card.root, []).append(card.id)
    found = dict[str, str]()
    for names in roots.values():
        first = min(names)
        found |= {name: first for name in names if name != first}
    return found


def _version(body: bytes | None) -> str:
    try:
        return msgspec.json.decode(body or b"", type=_Version).version
    except UNREADABLE:
        return ""
