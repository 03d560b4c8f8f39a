"""What `ppd doctor` looks at and what it says: frozen facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum

from ...fleet.worker import Load, Role, Worker


class Level(StrEnum):
    OK = "OK"
    WARN = "WARN"  # works, but not as well or as safely as it should
    FAIL = "FAIL"  # does not work; the exit code is 1
    SKIP = "SKIP"  # could not be checked, or has no meaning here


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `remedy` is a sentence on what to do, empty where there is nothing to do."""

    level: Level
    check: str
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class PortFact:
    """A port that the config wants; 0 means that it is not used."""

    key: str
    host: str
    port: int
    error: str = ""  # why it could not be bound


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFact:
    """A valid config, as far as it can be checked without a proxy. `*_error` is empty where all is well."""

    ports: tuple[PortFact, ...] = ()
    mode: str = "table"
    table: str = ""
    table_cells: int = 0  # with evidence
    table_error: str = ""
    heartbeat_host: str = "127.0.0.1"
    heartbeat_port: int = 0
    has_allow_list: bool = False
    has_curve: bool = False
    curve_error: str = ""
    has_admin_key: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyFact:
    """What a running proxy answered. `admin_status` is 0 where the admin API did not answer at all."""

    address: str
    error: str = ""  # why /health did not answer 200
    ready_status: int = 0
    ways: tuple[str, ...] = ()  # the routes that /ready says can be taken
    admin_status: int = 0
    mode: str = ""


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """An engine's counters since its start, or their growth; None where its metrics do not hold one. Tokens first."""

    computed: int | None = None
    local_hits: int | None = None
    transferred: int | None = None  # pulled from another engine, or found in a shared store
    expired: int | None = None  # handoffs that nobody pulled in time
    failed: int | None = None  # KV transfers

    def since(self, earlier: EngineCounts) -> EngineCounts | None:
        """The growth; None where a counter fell, as only a restart makes it do."""
        growth: dict[str, int | None] = {}
        for name in (field.name for field in fields(self)):
            now, then = getattr(self, name), getattr(earlier, name)
            growth[name] = None if now is None else now - (then or 0)
        if any(value is not None and value < 0 for value in growth.values()):
            return None
        return EngineCounts(**growth)

    @staticmethod
    def total(parts: Iterable[EngineCounts]) -> EngineCounts:
        """The sum; None stays where no part holds a number."""
        parts = tuple(parts)
        values = {field.name: [getattr(part, field.name) for part in parts] for field in fields(EngineCounts)}
        known = {name: [value for value in held if value is not None] for name, held in values.items()}
        return EngineCounts(**{name: sum(held) if held else None for name, held in known.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFact:
    """One worker: what config or proxy say of it, and what it answered to a probe from here."""

    name: str  # "D2"
    worker: Worker  # with models and version as the probe found them
    state: str = ""  # the proxy's word: up, draining or down; empty without a proxy
    reachable: bool = True  # it answered here, in whatever way
    healthy: bool = True  # its /health answered 200 here
    prefix_caching: bool | None = None  # as its metrics tell it; None: they do not
    load: Load | None = None
    counts: EngineCounts | None = None  # since its start

    @property
    def role(self) -> Role:
        return self.worker.role

    @property
    def serves(self) -> bool:
        """By the proxy's word where there is one: it may reach workers that are out of reach from here."""
        return self.state == "up" if self.state else self.healthy


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFact:
    """One turn of the probe conversation; names of workers are the proxy's."""

    status: int = 200  # 0: no answer
    error: str = ""
    route: str = ""
    reason: str = ""
    number: int = 0  # of the turn in its session, as the proxy counted
    decode: str = ""  # the D, or the R of a REPLICA turn
    prefill: str = ""
    handoff_missing: str = ""  # why P's answer could not be handed over
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None  # as the engine's usage says
    growth: tuple[tuple[str, EngineCounts], ...] = ()  # of the workers whose metrics could be read before and after

    def grown(self, name: str) -> EngineCounts | None:
        return dict(self.growth).get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeConversation:
    """The probe conversation; `skipped` says why there was none."""

    model: str = ""
    turns: tuple[TurnFact, ...] = ()
    skipped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that one run found out. `config` or `proxy` is there, or `config_error` says why the file can't be used."""

    config: ConfigFact | None = None
    config_error: str = ""
    proxy: ProxyFact | None = None
    workers: tuple[WorkerFact, ...] = ()
    conversation: ProbeConversation | None = None

    @property
    def mode(self) -> str:
        source = self.config or self.proxy
        return source.mode if source else ""

    def serving(self, *roles: Role) -> tuple[WorkerFact, ...]:
        return tuple(fact for fact in self.workers if fact.serves and fact.role in roles)
