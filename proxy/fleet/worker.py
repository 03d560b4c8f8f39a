"""What heartbeats, pings, probes and the config say of a worker: its identity and its load, as frozen values.

`Registry` keeps the latest of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, NewType

import msgspec

WorkerId = NewType("WorkerId", str)
"""`host:port` of the worker's HTTP address: unique, stable over a restart, and all that legs need."""

PairId = tuple[WorkerId, WorkerId]
"""A P and the D that it hands over to."""


class Role(StrEnum):
    PREFILL = "P"
    DECODE = "D"
    REPLICA = "R"
    ENCODE = "E"  # of images, sounds and videos; it computes no prompt


ANSWERING = frozenset((Role.DECODE, Role.REPLICA))
"""The roles whose workers answer clients."""

ENGINES = ("vllm", "sglang", "trtllm")  # that a config may name; others, of heartbeats, only pair with their like


class Source(StrEnum):
    """Where a worker is known from, which decides how it expires."""

    AGENT = "agent"  # the project's heartbeats: silent for `worker_ttl_s` means gone
    PING = "ping"  # vLLM's P2pNccl or MoRIIO pings: the same
    STATIC = "static"  # the config or the admin API: stays, and is up or down by HTTP probes


MOST_REQUESTS = 1 << 24
MOST_KV_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class Load:
    """From an engine's latest metrics."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # share of KV blocks in use, 0 to 1
    kv_capacity_tokens: int = 0  # 0: unknown

    @property
    def is_possible(self) -> bool:
        """False of a report that no engine can mean, as NaN, a negative count, or more sequences than tokens of KV."""
        running, capacity = self.running, self.kv_capacity_tokens
        is_counted = 0 <= running <= MOST_REQUESTS and 0 <= self.waiting <= MOST_REQUESTS
        is_room = 0 <= capacity <= MOST_KV_TOKENS and (not capacity or running <= capacity)
        return is_counted and is_room and 0.0 <= self.kv_usage <= 1.0


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where an engine publishes its KV events, over ZeroMQ; of several data-parallel ranks the first."""

    endpoint: str = ""  # tcp://host:port; empty: it does not, or connects to the proxy
    replay_endpoint: str = ""  # where it sends them again; empty: nowhere
    ranks: int = 1  # the ports of the others follow

    def of_rank(self, rank: int) -> EventSource:
        """Of one rank alone, as vLLM numbers its ports."""
        return EventSource(_after(self.endpoint, rank), _after(self.replay_endpoint, rank))


NO_EVENTS = EventSource()
UNHEARD = EventSource(ranks=0)  # it may publish, but is not to be listened to


def _after(endpoint: str, rank: int) -> str:
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}" if endpoint else ""


class PairingKind(NamedTuple):
    """What decides whether a P and a D can hand over, of the fields of `Worker` with these names."""

    connector: str
    engine: str
    engine_version: str
    models: tuple[str, ...]
    coordinates: frozenset[str]  # only their names: whether what the connector needs is known


PREFIX_CACHE = "prefix_cache"  # among a worker's coordinates: "true" or "false"
TAKES_PLAIN = "takes_plain"  # the same: whether a D takes what its connector, as it is published, cannot


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One backend server's identity; a changed `incarnation` means that its KV cache is gone."""

    role: Role
    address: str  # host:port of its HTTP server
    models: tuple[str, ...] = ()  # empty: not known yet, asked for by a probe
    aliases: dict[str, str] = field(default_factory=dict)  # names of one model, each with the one that stands for all
    connector: str = "nixl"
    coordinates: dict[str, str] = field(default_factory=dict)  # what the connector needs to name this worker
    engine: str = "vllm"
    engine_version: str = ""
    incarnation: str = ""
    source: Source = Source.STATIC
    tls: bool = False
    kv_events: EventSource = NO_EVENTS
    x: float | None = None  # of a D in mode `fraction`: the share of its sessions kept LOCAL; None: the config's
    profile: str = ""  # of its engine: a bundled profile's name, or of a static worker a path; empty: the config's
    labels: dict[str, str] = field(default_factory=dict)  # by which mode `profiles` chooses
    has_sidecar: bool = False  # at its address is a sidecar, which asks P itself and lets no handoff through
    is_trusted: bool = True  # False: who announced it is not known, so the proxy's own key does not go there

    @property
    def host(self) -> str:
        """Of its address; an IPv6 one without brackets."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def base_url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.address}"

    @property
    def keeps_prefixes(self) -> bool:
        """Whether the KV of a turn is there for the next one: unless the engine says that it is not, or its entry."""
        return self.coordinates.get(PREFIX_CACHE) != "false"

    @property
    def takes_plain(self) -> bool:
        """Whether this D takes a request without a transfer though its connector, as it is published, cannot."""
        return self.role is Role.DECODE and self.coordinates.get(TAKES_PLAIN) == "true"

    @property
    def pairing_kind(self) -> PairingKind:
        return PairingKind(self.connector, self.engine, self.engine_version, self.models, frozenset(self.coordinates))

    @property
    def id(self) -> WorkerId:
        return self.address  # type: ignore[return-value]  # WorkerId(...) would be a call, for nothing, at each step


def with_told(wanted: Worker, known: Worker, configured: Worker | None) -> Worker:
    """`wanted`, by a changed config, with what the engine has told of itself, until it is asked again.

    known: with that, as it was until now, and with what `configured` says: the config before. None: it was announced.
    """
    coordinates = dict[str, str]()
    if (wanted.connector, wanted.engine) == (known.connector, known.engine):
        before = {} if configured is None else configured.coordinates
        coordinates = {name: text for name, text in known.coordinates.items() if name not in before}
    is_told = configured is None or configured.kv_events == NO_EVENTS
    # What only the config before has said is not told: `model` is for engines that list none, so nothing would mend it.
    models, version = known.models, known.engine_version
    if configured is not None:
        models = () if models == configured.models else models
        version = "" if version == configured.engine_version else version
    return replace(
        wanted,
        models=wanted.models or models,
        aliases=known.aliases,
        engine_version=wanted.engine_version or version,
        kv_events=known.kv_events if is_told and wanted.kv_events == NO_EVENTS else wanted.kv_events,
        coordinates={**coordinates, **wanted.coordinates},
    )


class Announcement(msgspec.Struct, frozen=True):
    """The content of any of the three messages; `load` is None where the message carries none."""

    worker: Worker
    load: Load | None = None
    draining: bool = False
    leaving: bool = False


def settled(aliases: Mapping[str, str]) -> dict[str, str]:
    """The least name of each model that has several. aliases: as of all workers, which may know different names."""
    found = dict[str, str]()
    for name in sorted(aliases):  # so that what a lesser name comes to is known
        other = aliases[name]
        found[name] = found.get(other, other) if other < name else name
    return found
