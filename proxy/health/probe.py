"""One probe of an engine over HTTP: whether it is healthy, its models, its version and its load."""

from __future__ import annotations

import asyncio
import errno
import ssl
from dataclasses import dataclass, field

import aiohttp
import msgspec

from ..fleet.engine_metrics import EngineMetrics, parse_metrics

TIMEOUT_S = 5.0
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


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


class _Version(msgspec.Struct):
    version: str


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
) -> EngineStatus:
    """Never raises for what an engine does: one that can't be reached is not healthy."""
    headers = {"X-PPD-Hops": "1"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    refused = False

    async def ask(path: str) -> bytes | None:
        nonlocal refused
        try:
            getting = session.get(base_url + path, headers=headers, ssl=tls or True)
            async with asyncio.timeout(timeout_s), getting as response:
                data = await response.content.read(_TEXT_LIMIT_BYTES)
                while chunk := await response.content.read(_TEXT_LIMIT_BYTES - len(data)):
                    data += chunk
                return data if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as exc:  # ValueError: no host name
            refused = isinstance(exc, OSError) and exc.errno == errno.ECONNREFUSED
            return None

    if await ask("/health") is None:
        return EngineStatus(healthy=False, refused=refused)
    models, version, metrics = await asyncio.gather(ask("/v1/models"), ask("/version"), ask("/metrics"))
    return EngineStatus(
        healthy=True,
        models=_model_names(models),
        version=_version(version),
        metrics=parse_metrics((metrics or b"").decode("utf-8", "replace")),
        scraped=metrics is not None,
    )


def _model_names(body: bytes | None) -> tuple[str, ...]:
    try:
        return tuple(card.id for card in msgspec.json.decode(body or b"", type=_Models).data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ()


def _version(body: bytes | None) -> str:
    try:
        return msgspec.json.decode(body or b"", type=_Version).version
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
