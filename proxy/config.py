"""The proxy's settings: one frozen dataclass, checked once, built from a TOML file and flags.

Every field is a key of the file and a flag of `ppd serve` (`w_ttft` is `--w-ttft`). Seconds and bytes throughout.
`LIVE` names the keys that take effect while the proxy runs, when the file changes or through the admin API.
"""

from __future__ import annotations

import ipaddress
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any

from .errors import ConfigError

MIB = 1024 * 1024


class Mode(StrEnum):
    """How follow-up turns are routed; turn 1 is SPLIT in every mode but `replica`."""

    TABLE = "table"  # by the decision table
    ALWAYS_LOCAL = "always_local"  # x = 1
    ALWAYS_SPLIT = "always_split"  # x = 0
    FRACTION = "fraction"  # the share `x` of sessions
    REPLICA = "replica"  # every turn on a replica


class SessionKey(StrEnum):
    """What makes two requests one session."""

    PREFIX = "prefix"  # the messages themselves, and explicit ids
    FIRST_USER_MESSAGE = "first_user_message"  # the paper's rule: MD5 of the first user message


class Uncovered(StrEnum):
    """What a follow-up turn does where the table has no evidence."""

    LOCAL = "local"
    SPLIT = "split"


class Lookup(StrEnum):
    """How a turn finds its verdict in a table."""

    NEAREST = "nearest"  # the nearest cell's: the paper's way
    INTERPOLATED = "interpolated"  # between cells, linear in logarithms


class DataPlane(StrEnum):
    """Which server speaks plain HTTP/1.1 to clients; TLS and HTTP/2 always go to the stock one."""

    DIRECT = "direct"  # the proxy's own
    ASGI = "asgi"  # the stock server: Hypercorn and Quart


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """All settings of one proxy; ConfigError names the key, the value and what is allowed."""

    # where it listens
    host: str = "127.0.0.1"
    port: int = 10001
    processes: int = 1  # that share the port and behave as one proxy; about one for each core it may use
    admin_key: str = ""  # empty: the admin API is off
    keys_file: str = ""  # clients' API keys, hashed; empty: no key is asked for
    open_paths: tuple[str, ...] = ("/health", "/ready", "/metrics")  # answered without a key
    tls_cert_file: str = ""  # PEM chain: clients must then speak TLS
    tls_key_file: str = ""
    tls_client_ca_file: str = ""  # clients must then show a certificate of this authority
    data_plane: DataPlane = DataPlane.DIRECT
    shutdown_timeout_s: float = 30.0  # streams get this long to end after SIGTERM

    # what one client may ask of it
    body_limit_bytes: int = 64 * MIB
    body_memory_bytes: int = 0  # of all bodies under way in one process; 0: its part of a quarter of the memory
    head_limit_bytes: int = 64 * 1024
    header_limit: int = 100  # lines of a request's head
    json_depth_limit: int = 64
    request_units_limit: int = 20_000  # messages, parts, items, tool calls and tools of one request
    head_timeout_s: float = 10.0  # a connection's first byte, and a request's head from its first byte on
    idle_connection_s: float = 75.0  # between two requests on one connection
    connections_per_address: int = 4096

    # admission
    max_inflight: int = 4096  # turns at work
    max_worker_inflight: int = 512  # legs on one worker
    queue_limit: int = 2048  # turns that wait
    queue_timeout_s: float = 30.0

    # workers
    heartbeat_host: str = "127.0.0.1"  # where agents' and engines' ZeroMQ messages arrive
    heartbeat_port: int = 30001  # 0: no listener
    heartbeat_allow: tuple[str, ...] = ()  # ranges that may register; empty: all, but no pings if curve_port is set
    curve_port: int = 0  # 0: off; else agents register here, encrypted, with a known key
    curve_server_key_file: str = ""  # ZeroMQ certificate of the proxy, secret part
    curve_clients_dir: str = ""  # folder of the agents' public certificates
    worker_ttl_s: float = 30.0  # a silent worker is dropped after this long
    workers: tuple[str, ...] = ()  # static workers: "P=host:port", with ",connector=…,key=value" after it
    probe_interval_s: float = 5.0  # health and load of workers without an agent
    worker_api_key: str = ""  # sent to workers in place of the client's own Authorization
    worker_ca_file: str = ""  # authority of workers that speak TLS; empty: the system's
    worker_cert_file: str = ""  # the proxy's own certificate towards them
    worker_key_file: str = ""

    # sessions
    session_key: SessionKey = SessionKey.PREFIX
    session_ttl_s: float = 3600.0
    session_limit: int = 200_000

    # decisions
    mode: Mode = Mode.TABLE
    x: float = 0.5  # the share of sessions kept LOCAL in mode `fraction`
    table: str = "h100-llama-3.1-8b-2P_2D"  # a bundled table's name, or a path
    w_ttft: float = 1.0
    w_tpot: float = 1.0
    lookup: Lookup = Lookup.NEAREST
    uncovered: Uncovered = Uncovered.LOCAL
    qps_window_s: float = 30.0

    # legs
    connect_timeout_s: float = 3.0
    prefill_timeout_s: float = 120.0  # a whole prefill leg
    first_event_timeout_s: float = 120.0  # from asking D or R to its first event
    answer_timeout_s: float = 1800.0  # a whole answer that is not streamed
    idle_timeout_s: float = 120.0  # between two reads of an answer, and for a client to take what it is sent
    keepalive_s: float = 4.0  # idle upstream connections are dropped before vLLM's 5 s limit does it
    spare_connections: int = 2  # to each worker at least, ready before a turn needs one; 0: none
    attempts: int = 3  # tries of one turn before its first byte, the first one included
    retry_share: float = 0.2  # share of all turns that may be retried
    retry_burst: int = 100  # retries beyond that share, after a quiet time

    # workers' health
    breaker_failures: int = 3  # in a row, until the circuit breaker of a worker or a pair opens
    breaker_open_s: float = 5.0  # the first time; doubled each time in a row, up to two minutes
    warm_up_s: float = 10.0  # a new or recovered worker's share of traffic grows for this long
    canary_interval_s: float = 30.0  # one tiny conversation per pair of P and D; 0: none

    # records
    receipts_kept: int = 10_000
    receipt_log: str = ""  # JSON lines; empty: none
    log_level: str = "info"

    def __post_init__(self) -> None:
        _check(self)


OPERATOR_PATHS = ("/health", "/ready", "/metrics")
LIVE = frozenset({"mode", "x", "table", "w_ttft", "w_tpot", "lookup", "uncovered", "workers"})
SECRET = frozenset({"admin_key", "worker_api_key"})

_POSITIVE = (
    "body_limit_bytes worker_ttl_s probe_interval_s session_ttl_s session_limit qps_window_s connect_timeout_s "
    "prefill_timeout_s first_event_timeout_s answer_timeout_s idle_timeout_s keepalive_s attempts receipts_kept "
    "head_limit_bytes header_limit json_depth_limit request_units_limit head_timeout_s idle_connection_s "
    "connections_per_address max_inflight max_worker_inflight queue_timeout_s breaker_failures breaker_open_s"
).split()
_NOT_NEGATIVE = (
    "w_ttft w_tpot shutdown_timeout_s body_memory_bytes queue_limit spare_connections retry_share retry_burst "
    "warm_up_s canary_interval_s"
).split()
_PORTS = ("port", "heartbeat_port", "curve_port")
MOST_PROCESSES = 64  # each tells all others what it learns
_LOG_LEVELS = ("debug", "info", "warning", "error")


def _check(config: ProxyConfig) -> None:
    for name in _POSITIVE:
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            raise refused(name, value, "a number above 0")
    for name in _PORTS:
        if not 0 <= getattr(config, name) <= 65535:
            raise refused(name, getattr(config, name), "a port from 0 to 65535")
    for name in _NOT_NEGATIVE:
        value = getattr(config, name)
        if not (math.isfinite(value) and value >= 0):
            raise refused(name, value, "a number of at least 0")
    if not 1 <= config.processes <= MOST_PROCESSES:
        raise refused("processes", config.processes, f"a number from 1 to {MOST_PROCESSES}")
    if not 0.0 <= config.x <= 1.0:
        raise refused("x", config.x, "a share from 0 to 1")
    if config.log_level not in _LOG_LEVELS:
        raise refused("log_level", config.log_level, ", ".join(_LOG_LEVELS))
    for text in config.heartbeat_allow:
        try:
            ipaddress.ip_network(text)
        except ValueError:
            raise refused("heartbeat_allow", text, "address ranges such as 10.0.0.0/8") from None
    if config.curve_port and not (config.curve_server_key_file and config.curve_clients_dir):
        raise refused("curve_port", config.curve_port, "0, or both curve_server_key_file and curve_clients_dir set")
    _check_paths_and_certificates(config)


def _check_paths_and_certificates(config: ProxyConfig) -> None:
    # Whether certificates can be used shows when they are loaded.
    for path in config.open_paths:
        if path not in OPERATOR_PATHS:
            raise refused("open_paths", path, "any of " + ", ".join(OPERATOR_PATHS))
    for name in ("tls", "worker"):
        if bool(getattr(config, f"{name}_cert_file")) != bool(getattr(config, f"{name}_key_file")):
            raise refused(f"{name}_cert_file", getattr(config, f"{name}_cert_file"), f"set with {name}_key_file")
    if config.tls_client_ca_file and not config.tls_cert_file:
        raise refused("tls_client_ca_file", config.tls_client_ca_file, "set with tls_cert_file")


def refused(key: str, value: object, allowed: str) -> ConfigError:
    shown = "(hidden)" if key in SECRET else repr(value)
    return ConfigError(f"{key} = {shown}: must be {allowed}", param=key)


def read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = tomllib.load(file)
    except OSError as exc:
        raise ConfigError(f"config = {str(path)!r}: must be a readable file ({exc.strerror})", param="config") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError(f"config = {str(path)!r}: must be TOML ({exc})", param="config") from exc
    return {name: convert(name, value) for name, value in raw.items()}


def convert(name: str, value: object) -> Any:
    field = {f.name: f for f in fields(ProxyConfig)}.get(name)
    if field is None:
        known = ", ".join(f.name for f in fields(ProxyConfig))
        # The value is not shown: it may be a secret under a misspelt name.
        near = get_close_matches(name, [f.name for f in fields(ProxyConfig)], 1)
        meant = f"did you mean {near[0]}?" if near else f"known keys are {known}"
        raise ConfigError(f"{name}: no such key; {meant}", param=name)
    default = _default(field)
    if isinstance(default, StrEnum):
        try:
            return type(default)(value)  # type: ignore[arg-type]
        except ValueError:
            raise refused(name, value, "one of " + ", ".join(type(default))) from None
    if isinstance(default, tuple):
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise refused(name, value, "a list of strings")
        return tuple(value)
    if isinstance(value, int) and abs(value) > 2**53:
        raise refused(name, value, "a number of at most 2^53")
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not type(default):
        raise refused(name, value, {int: "a whole number", float: "a number", str: "a string"}[type(default)])
    return value


def _default(field: Field[Any]) -> Any:
    assert field.default is not MISSING, "every setting has a default"
    return field.default


def secrets_in(environ: Mapping[str, str]) -> dict[str, object]:
    """Secrets from PPD_* variables, as flags; on a command line all users could read them."""
    names = {name: f"PPD_{name.upper()}" for name in SECRET}
    return {name: environ[variable] for name, variable in names.items() if environ.get(variable)}


def build(path: Path | None, flags: Mapping[str, object]) -> ProxyConfig:
    settings = read_file(path) if path else {}  # flags override the file
    settings |= {name: convert(name, value) for name, value in flags.items()}
    return ProxyConfig(**settings)


def with_changes(running: ProxyConfig, before: ProxyConfig, wanted: ProxyConfig) -> tuple[ProxyConfig, tuple[str, ...]]:
    """The running config with the live keys that `wanted` changes, and the changed keys that need a restart."""
    changed = [f.name for f in fields(ProxyConfig) if getattr(wanted, f.name) != getattr(before, f.name)]
    live = {name: getattr(wanted, name) for name in changed if name in LIVE}
    return replace(running, **live), tuple(name for name in changed if name not in LIVE)
