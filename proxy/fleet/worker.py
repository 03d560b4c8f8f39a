"""Workers as the proxy knows them: who they are, how loaded they are, and whether they may be used.

`Worker` and `Load` are frozen values that sources (heartbeats, pings, probes, the config) hand in; `Registry` holds
the latest of each and answers with `WorkerView`, the frozen picture that the policy sees.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

import msgspec

WorkerId = NewType("WorkerId", str)
"""`host:port` of the worker's HTTP address: unique, stable over a restart, and all that legs need."""

PairId = tuple[WorkerId, WorkerId]
"""A P and the D that it hands over to."""


class Role(StrEnum):
    PREFILL = "P"
    DECODE = "D"
    REPLICA = "R"


class Source(StrEnum):
    """Who told us about a worker; decides how it expires."""

    AGENT = "agent"  # the project's heartbeats: silent for `worker_ttl_s` means gone
    PING = "ping"  # vLLM's P2pNccl or MoRIIO pings: the same
    STATIC = "static"  # the config or the admin API: stays, and is up or down by HTTP probes


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine's metrics said last."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # share of KV blocks in use, 0 to 1
    kv_capacity_tokens: int = 0  # 0: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One backend server's identity; a changed `incarnation` means that its KV cache is gone."""

    role: Role
    address: str  # host:port of its HTTP server
    models: tuple[str, ...] = ()  # empty: not known yet, asked for by a probe
    connector: str = "nixl"
    coordinates: dict[str, str] = field(default_factory=dict)  # what the connector needs to name this worker
    engine: str = "vllm"
    engine_version: str = ""
    incarnation: str = ""
    source: Source = Source.STATIC
    tls: bool = False

    @property
    def base_url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.address}"

    @property
    def id(self) -> WorkerId:
        return self.address  # type: ignore[return-value]  # WorkerId(...) would be a call, for nothing, at each step


class Announcement(msgspec.Struct, frozen=True):
    """What any of the three messages amounts to; `load` is None where the message carries none."""

    worker: Worker
    load: Load | None = None
    draining: bool = False
    leaving: bool = False
