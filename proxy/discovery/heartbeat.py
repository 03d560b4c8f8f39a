"""The three messages that announce a worker, as they are on the wire: msgpack maps in one ZeroMQ frame.

* ours: `Heartbeat`, sent by `ppd agent`, with a `version`;
* vLLM's P2pNccl ping: `type` P or D, `http_address`, `zmq_address` (vLLM 0.9 to 0.23);
* vLLM's MoRIIO ping: the same with `dp_size`, `tp_size` and `transfer_mode` (vLLM 0.14 on).

Sources: vLLM's `p2p_nccl_engine.py` and `moriio_common.py`; the layouts are in docs/protocols.md.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ..connectors import CONNECTORS, is_of_sidecars
from ..connectors.lmcache import LMCache, unpaired_ports
from ..connectors.moriio import MoRIIO, MoRIIORead, told_by_ping
from ..connectors.p2p_nccl import P2pNccl
from ..errors import FormatError
from ..fleet.worker import ANSWERING, NO_EVENTS, Announcement, EventSource, Load, Role, Source, Worker
from ..openai.request import MODEL_LIMIT

VERSION = 1
MESSAGE_LIMIT_BYTES = 64 * 1024  # also of a turn report; of each frame, on all ends
COORDINATES_LIMIT = 32
MODELS_LIMIT = 1024
RANKS_LIMIT = 64
LABELS_LIMIT = 64
PORT_LIMIT = 65535
TCP = "tcp://"
_ENDPOINT_START = re.compile(r"tcp://[A-Za-z0-9\[]")  # ZeroMQ takes no name that begins otherwise
_NAME = r"[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63}){0,20}"
_COORDINATE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TOKEN = re.compile(r"[\x21-\x7e]{0,256}")  # ends up in heads and bodies of legs
_LABEL_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL = re.compile(rf"(?:[a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_LABEL_NAME}")
_LABEL_VALUE = re.compile(rf"(?:{_LABEL_NAME})?")
_MODES = {"WRITE": MoRIIO.name, "READ": MoRIIORead.name}  # of a MoRIIO ping
_ADDRESS = re.compile(rf"(?:{_NAME}|\[[0-9A-Fa-f:.]{{2,45}}\]):([0-9]{{1,5}})")


class Heartbeat(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=False):
    """The project's own message, `version` 1; sent every 10 s and once more when the worker starts to drain."""

    version: int
    role: str  # P, D, R or E
    http_address: str
    models: list[str]
    aliases: dict[str, str] = {}  # names of one model, each with the one that stands for all
    engine: str = "vllm"
    engine_version: str = ""
    connector: str = "nixl"
    coordinates: dict[str, str] = {}
    incarnation: str = ""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    kv_capacity_tokens: int = 0
    draining: bool = False
    leaving: bool = False  # the engine is about to stop: forget it now
    tls: bool = False  # whether `http_address` speaks TLS
    kv_events: EventSource = NO_EVENTS  # on the host of `http_address`
    x: float | None = None  # of a D: its own share of sessions kept LOCAL, in mode `fraction`
    profile: str = ""  # the engine's, by the name of a profile that the proxy knows
    labels: dict[str, str] = {}  # of Kubernetes' form
    sidecar: bool = False  # of a D or R: whether `http_address` is that of a sidecar

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def decode(payload: bytes) -> Announcement:
    """The announcement in a frame; FormatError names the field that is missing or wrong."""
    try:
        message: Any = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise FormatError("heartbeat: not msgpack") from exc
    if not isinstance(message, dict):
        raise FormatError("heartbeat: not a map")
    if "version" in message:
        return _ours(message)
    return _ping(message)


def _ours(message: dict[str, Any]) -> Announcement:
    if message["version"] != VERSION:
        raise FormatError(f"heartbeat: version must be {VERSION}")
    try:
        beat = msgspec.convert(message, Heartbeat)
    except msgspec.ValidationError as exc:
        raise FormatError(f"heartbeat: {exc}") from exc
    if not 0.0 <= beat.kv_usage <= 1.0 or min(beat.running, beat.waiting, beat.kv_capacity_tokens) < 0:
        raise FormatError("heartbeat: running, waiting, kv_capacity_tokens or kv_usage out of range")
    check_models(beat.models)
    _check_aliases(beat)
    for name in ("engine", "engine_version", "connector", "incarnation", "profile"):
        _check_token(getattr(beat, name), name)
    worker = Worker(
        role=_role(beat.role),
        address=check_address(beat.http_address, "http_address"),
        models=tuple(beat.models),
        aliases=beat.aliases,
        connector=beat.connector,
        coordinates=check_coordinates(beat.coordinates, beat.connector),
        engine=beat.engine,
        engine_version=beat.engine_version,
        incarnation=beat.incarnation,
        source=Source.AGENT,
        tls=beat.tls,
        kv_events=_own_events(beat.kv_events, beat.http_address),
        x=check_x(beat.x, _role(beat.role)),
        profile=beat.profile,
        labels=check_labels(beat.labels),
        has_sidecar=check_sidecar(_role(beat.role), beat.connector, has_one=beat.sidecar),
    )
    load = Load(beat.running, beat.waiting, beat.kv_usage, beat.kv_capacity_tokens)
    return Announcement(worker, load, beat.draining, beat.leaving)


def _own_events(source: EventSource, address: str) -> EventSource:
    """The same; FormatError if they are published elsewhere than at the engine, or could not be subscribed to."""
    check_events(source)
    for endpoint in (source.endpoint, source.replay_endpoint):
        if endpoint and endpoint.removeprefix(TCP).rpartition(":")[0] != address.rpartition(":")[0]:
            raise FormatError("kv_events: must be on the host of http_address")
    return source


def check_events(source: EventSource) -> EventSource:
    """The same; FormatError unless each endpoint is tcp://host:port that ZeroMQ takes, with ports for all ranks."""
    endpoints = [endpoint for endpoint in (source.endpoint, source.replay_endpoint) if endpoint]
    if not all(map(_ENDPOINT_START.match, endpoints)):
        raise FormatError("kv_events: must be tcp://host:port")
    for endpoint in endpoints:
        check_address(endpoint.removeprefix(TCP), "kv_events")
    last = max((int(endpoint.rpartition(":")[2]) + source.ranks - 1 for endpoint in endpoints), default=0)
    if not 0 < source.ranks <= RANKS_LIMIT or last > PORT_LIMIT:
        raise FormatError(f"kv_events: ranks must be 1 to {RANKS_LIMIT}, with a port each")
    return source


def _ping(message: dict[str, Any]) -> Announcement:
    if message.get("type") not in ("P", "D"):
        raise FormatError("ping: type must be P or D")
    for name in ("http_address", "zmq_address"):
        if not isinstance(message.get(name), str):
            raise FormatError(f"ping: {name} is missing or not a string")
    if "transfer_mode" in message:
        connector = _MODES.get(str(message["transfer_mode"]))
        if connector is None:
            raise FormatError("ping: transfer_mode must be WRITE or READ")
        if (told := told_by_ping(message["zmq_address"])) is None:
            raise FormatError("ping: zmq_address must be host:HOST,handshake:PORT,notify:PORT")
        coordinates = told | {name: str(message[name]) for name in ("dp_size", "tp_size") if name in message}
    else:
        connector, coordinates = P2pNccl.name, {"zmq_address": message["zmq_address"]}
    worker = Worker(
        role=_role(message["type"]),
        address=check_address(message["http_address"], "http_address"),
        connector=connector,
        coordinates=check_coordinates(coordinates, connector),
        source=Source.PING,
    )
    return Announcement(worker)


def _role(text: str) -> Role:
    try:
        return Role(text)
    except ValueError:
        raise FormatError("heartbeat: role must be P, D, R or E") from None


def check_models(models: Sequence[str]) -> None:
    if len(models) > MODELS_LIMIT or not all(0 < len(name) <= MODEL_LIMIT and name.isprintable() for name in models):
        raise FormatError(f"models: must be at most {MODELS_LIMIT} names of at most {MODEL_LIMIT} printable characters")


def _check_aliases(beat: Heartbeat) -> None:
    """Else one worker could say that another's model is its own, under another name."""
    if not {*beat.aliases, *beat.aliases.values()} <= set(beat.models):
        raise FormatError("aliases: must be names of its own models")


def check_coordinates(coordinates: dict[str, str], connector: str) -> dict[str, str]:
    """The same; FormatError for what does not fit into a head, or is nothing that the connector could use."""
    if len(coordinates) > COORDINATES_LIMIT or not all(map(_COORDINATE.fullmatch, coordinates)):
        raise FormatError(f"coordinates: must be at most {COORDINATES_LIMIT} names of letters, digits, dot, - and _")
    for name, value in coordinates.items():
        _check_token(value, name)
    known = CONNECTORS[connector].coordinates if connector in CONNECTORS else {}
    for name in known.keys() & coordinates.keys():
        if known[name].pattern.fullmatch(coordinates[name]) is None:
            raise FormatError(f"{name} = {coordinates[name]}: must be {known[name].allowed}")
    if connector == LMCache.name and unpaired_ports(coordinates):
        raise FormatError("receiver_init_port: must have as many ports as receiver_alloc_port, one of each rank")
    return coordinates


def check_labels(labels: dict[str, str]) -> dict[str, str]:
    """The same; FormatError unless they have the form that Kubernetes allows.

    https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set
    """
    if len(labels) > LABELS_LIMIT:
        raise FormatError(f"labels: must be at most {LABELS_LIMIT}")
    for name, value in labels.items():
        if _LABEL.fullmatch(name) is None or _LABEL_VALUE.fullmatch(value) is None:
            raise FormatError(
                "labels: must be [PREFIX/]NAME=VALUE, NAME and VALUE of at most 63 letters, digits, . - _"
            )
    return labels


def check_x(x: float | None, role: Role) -> float | None:
    """The same; FormatError for one that is no share, or of a worker that has no LOCAL turns."""
    if x is not None and (role is not Role.DECODE or not 0.0 <= x <= 1.0):
        raise FormatError("x: must be a share from 0 to 1, and of a D")
    return x


def check_sidecar(role: Role, connector: str, *, has_one: bool) -> bool:
    """The same; FormatError for a worker that no sidecar can stand before: it asks no P for what D is told of it."""
    if has_one and (role not in ANSWERING or (connector in CONNECTORS and not is_of_sidecars(connector))):
        raise FormatError("sidecar: must be of a D or R, whose connector need not ask P for its coordinates")
    return has_one


def _check_token(text: str, name: str) -> None:
    if _TOKEN.fullmatch(text) is None:
        raise FormatError(f"{name}: must be at most 256 printable ASCII characters without spaces")


def check_address(text: str, name: str) -> str:
    """`host:port`, or FormatError naming the field: an address becomes a URL and must hold nothing else."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match.group(1)) <= PORT_LIMIT:
        raise FormatError(f"{name}: must be host:port")
    if text.startswith("["):
        try:
            ipaddress.IPv6Address(text[1 : text.index("]")])
        except ValueError:
            raise FormatError(f"{name}: must be host:port") from None
    return text
