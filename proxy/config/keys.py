"""Every key of the config, each one field: its type and bounds, what it is for, and its default.

A key belongs to the group that is named last before it. Seconds and bytes throughout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from ..errors import ConfigError, ConfigErrors, PPDError
from .choices import (
    AccessFormat,
    DataPlane,
    EncoderUse,
    LogFormat,
    LogLevel,
    Lookup,
    Mode,
    SessionKey,
    StageOrder,
    Uncovered,
    ZeroMeans,
)
from .constraints import CONSTRAINTS, Constraint
from .key import AtLeastOne, Count, Key, NotNegative, Port, Seconds, Share, Text, Texts, key, keys_of, wrong_part

MIB = 1024 * 1024
MOST_PROCESSES = 64  # each tells all others what it learns

OperatorPath = Literal["/health", "/ready", "/metrics"]
OPERATOR_PATHS: tuple[OperatorPath, ...] = ("/health", "/ready", "/metrics")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """All settings of one proxy; ConfigError names each key that is wrong, its value and what is allowed."""

    host: Text = key("127.0.0.1", "where clients connect", group="Where it listens")
    port: Port = key(10001, "where clients connect; 0: any free port")
    processes: Annotated[int, Meta(ge=1, le=MOST_PROCESSES)] = key(
        1, "processes that share the port and behave as one proxy (docs/processes.md); about one per core"
    )
    admin_key: Text = key("", "opens the admin API; empty: it is off", secret=True)
    keys_file: Text = key("", "clients' API keys, hashed; empty: no key is required")
    share_prefixes: Texts = key((), "tenants of the `keys_file` whose prompts share cached KV; others never do")
    open_paths: Annotated[tuple[OperatorPath, ...], Meta(max_length=3)] = key(
        OPERATOR_PATHS, "answered without a key; those that are left out need the admin key"
    )
    cors_allow_origins: Texts = key(
        (),
        "exact origins, such as `https://chat.example`, whose web pages may use the clients' API from users' browsers, "
        "or `*` for all; never the admin API, `/health`, `/ready` and `/metrics`",
    )
    tls_cert_file: Text = key("", "PEM chain; if set, clients must use TLS")
    tls_key_file: Text = key("", "private key of that certificate")
    tls_client_ca_file: Text = key("", "if set, clients must show a certificate of this authority")
    data_plane: DataPlane = key(
        DataPlane.NATIVE,
        "what serves turns over HTTP/1.1: `native`, the connection itself, on compiled sockets; `direct`, the same on "
        "the event loop's, and in place of `native` where that is not built; or `asgi`, the ASGI application "
        "(docs/data-path.md)",
    )
    shutdown_timeout_s: NotNegative = key(30.0, "time for answers to finish after SIGTERM")
    drain_delay_s: NotNegative = key(
        0.0,
        "for this long after SIGTERM `/ready` says 503 while turns are still taken, so that load balancers notice "
        "first; then the port closes and `shutdown_timeout_s` begins",
    )

    body_limit_bytes: AtLeastOne = key(64 * MIB, "larger request bodies get 413", group="What one client may ask of it")
    head_limit_bytes: AtLeastOne = key(64 * 1024, "request heads with more bytes get 431")
    header_limit: AtLeastOne = key(100, "request heads with more lines get 431")
    body_memory_bytes: Count = key(
        0,
        "of all bodies under way in one process; beyond it, they wait for up to `head_timeout_s` and then get 503; 0: "
        "its part of a quarter of the memory that the processes may use",
    )
    request_units_limit: AtLeastOne = key(
        20_000,
        "a request with more elements in its lists of messages, parts, items, tool calls and tools gets 400",
    )
    json_depth_limit: AtLeastOne = key(64, "bodies nested deeper get 400")
    media_limit: AtLeastOne = key(512, "a request with more images, sounds and videos gets 400")
    head_timeout_s: Seconds = key(
        10.0, "for a connection's first byte, and for the rest of a request's head after its first byte"
    )
    idle_connection_s: Seconds = key(75.0, "how long a connection stays open between two requests")
    connections_per_address: AtLeastOne = key(
        4096,
        "more connections from one client address are refused, after those without a request, longest idle first, are "
        "closed; so are, in each process, those beyond a third of its open-file limit (`ulimit -Hn`, less 128)",
    )

    max_inflight: AtLeastOne = key(4096, "turns that run at once; the others queue", group="Admission")
    max_worker_inflight: AtLeastOne = key(
        512,
        "legs on one worker at once; a D or R that reports its load gets fewer: as many as it can run, and a few more",
    )
    queue_limit: Count = key(2048, "how many turns wait at most")
    queue_timeout_s: Seconds = key(30.0, "how long a turn waits at most")
    queue_wait_s: NotNegative = key(
        0.5,
        "under overload (the queue has stood for 1.5 s, and more turns keep coming than leave) turns wait no longer "
        "than this, or than half the time that a turn takes, if that is longer; the others get 503; 0: no such limit",
    )

    heartbeat_host: Text = key(
        "127.0.0.1", "where agents and engines announce themselves, over ZeroMQ", group="Workers"
    )
    heartbeat_port: Port = key(30001, "port of those messages; 0: no listener")
    heartbeat_allow: Texts = key(
        (), "address ranges that may register; empty: all, but no pings if `curve_port` is set"
    )
    heartbeat_open: bool = key(
        False, "a `heartbeat_host` beyond this machine then needs neither `heartbeat_allow` nor `curve_port`"
    )
    curve_port: Port = key(
        0,
        "encrypted port for agents with known keys; the plain port then takes only engines' pings, from "
        "`heartbeat_allow`; 0: off",
    )
    curve_server_key_file: Text = key("", "ZeroMQ certificate of the proxy, with its secret key")
    curve_clients_dir: Text = key("", "folder of the agents' public certificates")
    worker_ttl_s: Seconds = key(30.0, "a worker without a heartbeat for this long is dropped")
    workers: Texts = key(
        (),
        "static workers, `ROLE=host:port`, optionally followed by "
        "`,connector=NAME` and what that must know (docs/protocols.md has the names), "
        "`,engine=vllm|sglang|trtllm`, `,model=NAME`, `,tls=true`, `,events=tcp://host:port` (`none`: not even where "
        "the engine itself tells), `,replay=tcp://host:port`, `,ranks=N`, `,profile=NAME` (as the key `profile`), "
        "`,label.NAME=VALUE` (docs/epp-config.md), for a D or R `,sidecar=true`: its address is that of a sidecar "
        "(docs/gateway.md), and for a D `,x=SHARE`: its own `x` in mode `fraction`",
        live=True,
    )
    allow_empty: bool = key(
        False, "a changed file may be empty, or name no worker where it named some; otherwise it is not used", live=True
    )
    kv_events_bind: Text = key(
        "",
        "where engines that connect to the proxy publish KV events, as `tcp://127.0.0.1:5557`, under topics "
        "`kv@host:port` of their HTTP addresses; needs `processes = 1`; empty: the proxy connects to engines",
    )
    kv_events_allow: Texts = key((), "address ranges of the engines that may connect there; empty: all")
    probe_interval_s: Seconds = key(5.0, "how often workers without an agent are probed for health and load")
    worker_api_key: Text = key(
        "",
        "sent to workers, but not to those that a stranger may have announced; if empty, the client's own "
        "Authorization is sent, unless there is a `keys_file`",
        secret=True,
    )
    worker_ca_file: Text = key("", "authority for workers that use TLS; empty: the system's")
    worker_cert_file: Text = key("", "the certificate that the proxy shows to workers")
    worker_key_file: Text = key("", "private key of that certificate")

    session_key: SessionKey = key(
        SessionKey.PREFIX,
        "what makes two requests one session: their messages, or the first user message, which is the paper's rule",
        group="Sessions",
    )
    session_ttl_s: Seconds = key(3600.0, "idle sessions are forgotten after this time")
    session_limit: AtLeastOne = key(200_000, "how many sessions are remembered; beyond that, the oldest are forgotten")
    templates_with_call_ids: Texts = key(
        ("*stral*", "*xtral*", "*kimi*"),
        "models whose chat template prints the ids of tool calls, by served name in any case; `*` stands for any "
        "characters. For all others a call is known by its place, so a client may number its calls anew",
    )
    tokenizer: Text = key(
        "",
        "folder with the model's `tokenizer.json` and chat template, or with such a folder for each model, by served "
        "name; a process beside the proxy then tokenises prompts; needs the extra `tokenizer`; empty: none",
    )
    tokenizer_wait_s: Seconds = key(0.005, "how long a turn waits for its tokens; then it goes on with estimates")

    mode: Mode = key(
        Mode.TABLE,
        "how turns are routed: by a table, by a fixed rule, by limits, or by what the laws predict, as `slo` does "
        "(docs/modes.md)",
        live=True,
        group="Decisions",
    )
    order: StageOrder = key(
        StageOrder.MODE,
        "which worker of a SPLIT is chosen first: `prefill_first`, P, and then a D among those that pair with it; "
        "`decode_first`, D, and then the mode judges whether a P computes what it lacks; or as the `mode` has it "
        "(docs/modes.md)",
        live=True,
    )
    order_by_model: Texts = key(
        (), "other orders of models by served name, as `llama:decode_first`; they count before `order`", live=True
    )
    epp_config: Text = key(
        "", "file of llm-d's plugins, for mode `profiles` (docs/epp-config.md); needs the extra `gateway`", live=True
    )
    zero_means: ZeroMeans = key(
        ZeroMeans.API_VERSION,
        "whether 0 `nonCachedTokens` in that file split every prompt or none; `api_version`: as its version means it",
        live=True,
    )
    x: Share = key(0.5, "share of sessions kept LOCAL in mode `fraction`, on a D that has no `x` of its own", live=True)
    local_tokens: Count = key(
        2048, "uncached tokens that a D computes, in modes `prefix_threshold`, `isl_*` and `conditional`", live=True
    )
    local_share: Share = key(
        0.7, "share of a prompt that uncached tokens must stay below too, in modes `isl_*`", live=True
    )
    prefill_busy_tokens: Count = key(
        8192, "tokens queued for every P, from which on modes `prefill_load` and `isl_or_load` say LOCAL", live=True
    )
    prefill_busy_requests: Count = key(2, "requests on every P, from which on mode `conditional` says LOCAL", live=True)
    decode_busy_requests: Count = key(
        0, "requests on a D, from which on modes `isl_*` and `prefill_load` never say LOCAL; 0: no limit", live=True
    )
    table: Text = key("h100-llama-3.1-8b-2P_2D", "name of a shipped table, or a path", live=True)
    w_ttft: NotNegative = key(1.0, "weight of a turn's TTFT", live=True)
    w_tpot: NotNegative = key(1.0, "weight of a turn's TPOT", live=True)
    weights_by_model: Texts = key(
        (),
        "other weights of models by served name, as `llama:w_ttft=1,w_tpot=3`; a key's own `w_ttft` and `w_tpot` in "
        "the `keys_file` count first; for mode `weights`: tables have the config's",
        live=True,
    )
    slo_ttft_s: Annotated[float, Meta(gt=0, le=3600)] = key(
        0.25, "a turn's TTFT may be this, or `slo_ttft_factor` times what it takes on an idle engine", live=True
    )
    slo_ttft_factor: Annotated[float, Meta(gt=0, le=1000)] = key(
        3.0, "see `slo_ttft_s`: whichever of the two is more", live=True
    )
    slo_tpot_s: Annotated[float, Meta(gt=0, le=60)] = key(0.025, "a turn's mean TPOT may be this", live=True)
    slo_by_priority: Texts = key(
        (),
        "other targets of classes, as `10:ttft=2,tpot=0.1`: for turns of priority 10 and more, up to the next entry; "
        "their keys' `slo` and the header `X-PPD-SLO` count first (docs/protocols.md)",
        live=True,
    )
    lookup: Lookup = key(
        Lookup.NEAREST, "the nearest cell of the table, or between its cells (tables/README.md)", live=True
    )
    uncovered: Uncovered = key(Uncovered.LOCAL, "route where the table has no evidence", live=True)
    profile: Text = key(
        "",
        "engine profile (tables/profiles/README.md), by the name of a bundled one or as a path, of workers that name "
        "none of their own; by it turns' times are predicted (docs/laws.md); empty: none",
        live=True,
    )
    long_prefill_tokens: Count = key(
        0,
        "what engines compute of one prompt in a step while they have other requests, as they were started: vLLM's "
        "`--long-prefill-token-threshold` (docs/laws.md); 0: as their profile says",
        live=True,
    )
    moves_kv: bool = key(
        False,
        "whether modes that predict, and `profiles`, may have a D or R lend itself as P: it computes a prompt whose "
        "beginning it holds, and another one pulls the KV and answers; for engines whose connector is nixl, R too",
        live=True,
    )
    prefills_answer: bool = key(
        False,
        "whether modes that predict may have a P answer a turn alone, as an R does (route REPLICA), so that its cache "
        "holds sessions too; in any mode P then answer while no D and no R can; for engines whose connector is nixl, "
        "not for `/v1/responses` (docs/modes.md)",
        live=True,
    )
    explore_share: Share = key(
        0.0,
        "share of turns in mode `slo` that go to another worker than the best, where that is expected to cost at most "
        "0.05 misses: so the laws hear of workers that they would avoid",
        live=True,
    )
    qps_window_s: Seconds = key(30.0, "window over which the arrival rate is measured")

    encoder: EncoderUse = key(
        EncoderUse.AUTO,
        "which images, sounds and videos an encoder (E) encodes: `auto`, those that cost less so; `always`, all; "
        "`never`, none (docs/encoders.md)",
        group="Encoders",
    )
    encoder_batch: AtLeastOne = key(1, "items of a request that one request to an E may hold")
    encoder_strip: bool = key(
        False,
        "send P, D and R, in chat completions, an item's metadata in place of its data, where E's answer has some; "
        "for engines with `--enable-mm-embeds`",
    )
    encoder_min_pixels: Count = key(65_536, "with `auto`, an image with fewer pixels goes to no E")
    encoder_min_bytes: Count = key(0, "with `auto`, an item with fewer bytes goes to no E")
    encoder_timeout_s: Seconds = key(10.0, "for all of a request's items on E; then the turn goes on as it came")

    connect_timeout_s: Seconds = key(3.0, "to connect to a worker", group="Legs")
    prefill_timeout_s: Seconds = key(120.0, "for a whole prefill leg")
    handoff_max_age_s: Seconds = key(20.0, "from asking P until D is sent the handoff; two thirds of P's lease")
    first_event_timeout_s: Seconds = key(120.0, "from asking D or R for a stream to its first event")
    answer_timeout_s: Seconds = key(1800.0, "for a whole answer that is not streamed")
    idle_timeout_s: Seconds = key(
        120.0, "between two reads of an answer or of a request's body, and for a client to read what it is sent"
    )
    keepalive_s: Seconds = key(4.0, "idle connections to workers are closed after this; vLLM closes them after 5 s")
    spare_connections: Count = key(2, "connections to each worker kept open at least; 0: none")
    relay_headers: Texts = key(
        ("endpoint-load-metrics*", "x-ratelimit-*", "server-timing"),
        "headers of workers' answers that go on to clients; `*` ends the beginning of a name. Never those of the "
        "connection, nor one that names the worker's address",
    )
    attempts: AtLeastOne = key(
        3,
        "failed answers after which a turn gives up and the client gets the last error; after as many failed "
        "prefills, the turn is computed without P; refused connections do not count",
    )
    retry_share: NotNegative = key(0.2, "retry budget: share of all turns that may be retried")
    retry_burst: Count = key(100, "retries beyond that share, after a quiet time")
    poison_s: NotNegative = key(
        60.0,
        "how long a prompt is refused at which two workers have ended the connection; shared by the prompts that they "
        "took with them; 0: not at all",
    )

    breaker_failures: AtLeastOne = key(
        3,
        "failures in a row that open the circuit breaker of a worker, or of a pair of P and D",
        group="Workers' health",
    )
    breaker_open_s: Seconds = key(
        5.0, "how long a circuit breaker stays open at first (doubles each time in a row, up to two minutes)"
    )
    warm_up_s: NotNegative = key(10.0, "slow start: time over which a new or returning worker's share of traffic grows")
    canary_interval_s: NotNegative = key(
        30.0, "time between canaries (tiny conversations) over a pair of P and D that no turn uses; 0: none"
    )

    picker_host: Text = key("127.0.0.1", "where Envoy asks this proxy which worker gets a turn", group="Envoy")
    picker_port: Port = key(0, "port of that endpoint picker (gRPC, without TLS; needs the extra `gateway`); 0: none")
    picker_health_port: Port = key(0, "a port that answers gRPC health checks only; 0: just `picker_port` does")
    picker_shadow: bool = key(False, "this picker only watches what another one decides, and notes what it would have")
    picker_fallbacks: Count = key(0, "how many workers a picker names behind the chosen one, for Envoy to ask next")
    picker_workers_file: Text = key(
        "", "a file in which a picker keeps the addresses of D and R, for an Envoy that must know them; empty: none"
    )

    receipts_kept: AtLeastOne = key(
        10_000,
        "how many receipts are kept in memory, for `/admin/requests/{id}`; one of many legs takes the place of several",
        group="Records",
    )
    receipt_log: Text = key("", "a file for all receipts, one JSON line per turn; empty: none")
    access_log: AccessFormat = key(AccessFormat.OFF, "one line for each request, on standard output")
    log_level: LogLevel = key(LogLevel.INFO, "the least severe lines that are logged, on stderr")
    log_format: LogFormat = key(LogFormat.TEXT, "one line of text, or one JSON object")
    log_lines_per_minute: Count = key(
        200, "of each kind of line above DEBUG; how many are held back is told; 0: no limit"
    )

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in KEYS}
        errors = [not_allowed(one, values[one.name]) for one in KEYS.values() if not one.fits(values[one.name])]
        if errors := errors or [error_of(constraint, values) for constraint in broken_constraints(values)]:
            raise all_of(errors)


KEYS = {one.name: one for one in keys_of(ProxyConfig)}
LIVE = frozenset(name for name, one in KEYS.items() if one.is_live)
SECRET = frozenset(name for name, one in KEYS.items() if one.is_secret)


def broken_constraints(values: Mapping[str, object]) -> list[Constraint]:
    """values: of the right types; keys that are absent have their defaults."""
    return [one for one in CONSTRAINTS if not one.holds(*(_value(values, name) for name in one.keys))]


def error_of(constraint: Constraint, values: Mapping[str, object]) -> ConfigError:
    name, *others = constraint.keys
    value = _value(values, name)
    return refused(name, value if others else wrong_part(value, constraint.holds), constraint.allowed)


def _value(values: Mapping[str, object], name: str) -> object:
    return values.get(name, KEYS[name].default)


def refused(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name} = {KEYS[name].shown(value)}: must be {allowed}", param=name)


def not_allowed(one: Key, value: object) -> ConfigError:
    return refused(one.name, wrong_part(value, one.fits), one.allowed)


def all_of(errors: Iterable[PPDError]) -> PPDError:
    """One error that tells all of them, of which there is one at least."""
    told = [part for error in errors for part in (error.errors if isinstance(error, ConfigErrors) else (error,))]
    return told[0] if len(told) == 1 else ConfigErrors(told)
