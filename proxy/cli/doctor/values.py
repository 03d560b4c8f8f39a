"""The values of `ppd doctor`: facts, which the checks read, and findings, which they return."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum

from ...fleet.worker import Load, Role, Worker


class Level(StrEnum):
    OK = "OK"
    WARN = "WARN"  # works, but not as well or as safely as it should
    FAIL = "FAIL"  # does not work; the exit code is 1
    SKIP = "SKIP"  # could not be checked, or does not apply


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `remedy` says what to do, and is empty if there is nothing to do."""

    level: Level
    check: str
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class PortFact:
    """A port in the config; 0: not used, or for `port` any free one."""

    key: str
    host: str
    port: int
    error: str = ""  # why it could not be bound


@dataclass(frozen=True, slots=True)
class DataPlaneFact:
    """What serves turns over HTTP/1.1, what the config says, and whether the compiled modules are there."""

    serving: str = "direct"
    configured: str = "direct"
    is_built: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFact:
    """A valid config, as far as it can be checked without a proxy. `*_error` is empty if all is well."""

    notices: tuple[str, ...] = ()  # of what it says in vain
    ports: tuple[PortFact, ...] = ()
    mode: str = "table"
    prefills_answer: bool = False
    table: str = ""
    table_cells: int = 0  # with evidence
    table_error: str = ""
    heartbeat_host: str = "127.0.0.1"
    heartbeat_port: int = 0
    has_allow_list: bool = False
    has_curve: bool = False
    curve_error: str = ""
    has_admin_key: bool = True
    data_plane: DataPlaneFact = DataPlaneFact()  # as this machine would serve


@dataclass(frozen=True, slots=True)
class LawsFact:
    """How well a profile or a table predicts, as the proxy judges it."""

    basis: str  # profile or table
    name: str
    figure: str  # ttft or tpot
    turns: int
    median_error: float
    stale: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyFact:
    """What a running proxy answered. `admin_status` is 0 if the admin API did not answer."""

    address: str
    error: str = ""  # why /health did not answer 200
    ready_status: int = 0
    ways: tuple[str, ...] = ()  # the routes that /ready says can be taken
    admin_status: int = 0
    mode: str = ""
    data_planes: tuple[DataPlaneFact, ...] = ()  # of its processes, all the same but while they are replaced
    laws: tuple[LawsFact, ...] = ()
    turns_beyond_range: Mapping[str, int] = field(default_factory=dict)  # by profile


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """An engine's counters since its start, or their growth. The first three are tokens. None: not in its metrics."""

    computed: int | None = None
    local_hits: int | None = None
    transferred: int | None = None  # pulled from another engine, or found in a shared store
    expired: int | None = None  # handoffs that nobody pulled in time
    failed: int | None = None  # KV transfers

    def since(self, earlier: EngineCounts) -> EngineCounts | None:
        """The growth; None if a counter fell, which happens only at a restart."""
        growth: dict[str, int | None] = {}
        for name in (one.name for one in fields(self)):
            now, then = getattr(self, name), getattr(earlier, name)
            growth[name] = None if now is None else now - (then or 0)
        if any(value is not None and value < 0 for value in growth.values()):
            return None
        return EngineCounts(**growth)

    @staticmethod
    def total(parts: Iterable[EngineCounts]) -> EngineCounts:
        """The sum of each counter; None if no part has it."""
        parts = tuple(parts)
        values = {one.name: [getattr(part, one.name) for part in parts] for one in fields(EngineCounts)}
        known = {name: [value for value in held if value is not None] for name, held in values.items()}
        return EngineCounts(**{name: sum(held) if held else None for name, held in known.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFact:
    """One worker: what the config or the proxy says about it, and what it answered to a probe from here."""

    name: str  # "D2"
    worker: Worker  # models and version are those that the probe found
    state: str = ""  # reported by the proxy: up, draining or down; empty without a proxy
    reachable: bool = True  # it answered a request from here, with any status
    healthy: bool = True  # its /health answered 200 here
    why: str = ""  # it is not healthy, as seen from here
    wants_key: bool = False  # it answered 401 or 403 here
    prefix_caching: bool | None = None  # according to its metrics; None: they do not tell
    load: Load | None = None
    counts: EngineCounts | None = None  # since its start

    @property
    def role(self) -> Role:
        return self.worker.role

    @property
    def serves(self) -> bool:
        """By the proxy's state if there is one: the proxy may reach workers that can't be reached from here."""
        return self.state == "up" if self.state else self.healthy


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFact:
    """One turn of the probe conversation; names of workers are the proxy's."""

    status: int = 200  # 0: no answer
    is_late: bool = False  # there was none in the time that a turn is given
    error: str = ""
    route: str = ""
    reason: str = ""
    number: int = 0  # of the turn in its session, as counted by the proxy
    decode: str = ""  # the D, or the R of a REPLICA turn
    prefill: str = ""
    handoff_missing: str = ""  # why P's answer could not be handed over
    failed_legs: str = ""  # of its receipt, in words
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
    forced: tuple[TurnFact, ...] = ()  # one that is made to be SPLIT, where none of the conversation was
    read_back: tuple[TurnFact, ...] = ()  # two more, of which P reads the first one's KV back from D for the second
    skipped: str = ""

    @property
    def all_turns(self) -> tuple[TurnFact, ...]:
        return (*self.turns, *self.forced, *self.read_back)


@dataclass(frozen=True, slots=True)
class Encoding:
    """What became of a tiny image that an E was asked to encode."""

    worker: str
    status: int = 0  # 0: no answer, or none of an E
    error: str = ""
    seconds: float = 0.0
    tells: bool = False  # where the embedding is


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that one run found out. `config` or `proxy` is there, or `config_error` says why the file can't be used."""

    config: ConfigFact | None = None
    config_error: str = ""
    proxy: ProxyFact | None = None
    workers: tuple[WorkerFact, ...] = ()
    conversation: ProbeConversation | None = None
    encodings: tuple[Encoding, ...] = ()

    @property
    def can_force(self) -> bool:
        """Whether the proxy takes a forced route from here."""
        return self.proxy is not None and self.proxy.admin_status == 200

    @property
    def mode(self) -> str:
        source = self.config or self.proxy
        return source.mode if source else ""

    @property
    def prefills_answer(self) -> bool:
        """Whether P answer in place of D and R; a proxy says so where there is no R."""
        if self.config is not None:
            return self.config.prefills_answer
        return self.proxy is not None and "replica" in self.proxy.ways and not self.serving(Role.REPLICA)

    def serving(self, *roles: Role) -> tuple[WorkerFact, ...]:
        return tuple(fact for fact in self.workers if fact.serves and fact.role in roles)
