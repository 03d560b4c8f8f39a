"""What the values of some keys must be together, and what no type says of one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from .addresses import PORT_PATTERN, are_origins, are_ranges, is_loopback


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the values of some keys must be together, or what no type says. `keys[0]` is the one that an error names."""

    keys: tuple[str, ...]
    allowed: str
    holds: Callable[..., bool]  # of the keys' values, in order


def _both_or_neither(one: str, other: str) -> bool:
    return bool(one) == bool(other)


def _fits_in_a_header(key: str) -> bool:
    return key.isascii() and key.isprintable() and key == key.strip()


_HEADERS = ("admin_key", "worker_api_key")
_HOSTS = ("host", "picker_host")  # an empty one, as of a variable that is not set, would be all addresses
_RANGES = ("heartbeat_allow", "kv_events_allow")
_CURVE = ("curve_server_key_file", "curve_clients_dir")

CONSTRAINTS = (
    Constraint(
        ("cors_allow_origins",),
        'origins as browsers send them, as https://chat.example or http://localhost:3000, or "*" alone',
        are_origins,
    ),
    *(Constraint((name,), "an address or a host's name; 0.0.0.0 is all of this machine", bool) for name in _HOSTS),
    *(
        Constraint((name,), "printable ASCII without spaces around it, as an HTTP header holds it", _fits_in_a_header)
        for name in _HEADERS
    ),
    *(Constraint((name,), "address ranges such as 10.0.0.0/8", are_ranges) for name in _RANGES),
    Constraint(
        ("heartbeat_host", "heartbeat_port", "heartbeat_allow", "curve_port", "heartbeat_open"),
        "a loopback address, unless heartbeat_allow, or curve_port, or heartbeat_open = true is set: whoever "
        "registers a worker gets prompts",
        lambda host, port, allow, curve, is_open: not port or is_loopback(host) or bool(allow or curve or is_open),
    ),
    Constraint(
        ("curve_port", "curve_server_key_file", "curve_clients_dir"),
        "0, or both curve_server_key_file and curve_clients_dir set",
        lambda port, key, folder: not port or bool(key and folder),
    ),
    *(
        Constraint(
            (name, "curve_port"),
            "set with curve_port, the port that asks for keys",
            lambda file, port: port or not file,
        )
        for name in _CURVE
    ),
    Constraint(
        ("share_prefixes", "keys_file"),
        "set with keys_file, whose tenants it names",
        lambda some, file: not some or file,
    ),
    Constraint(("tls_cert_file", "tls_key_file"), "set with tls_key_file", _both_or_neither),
    Constraint(
        ("kv_events_bind",),
        "empty, or tcp://host:port, with a port from 1 to 65535",
        lambda bind: not bind or re.fullmatch(rf"tcp://.+:{PORT_PATTERN}", bind) is not None,
    ),
    Constraint(("kv_events_bind", "processes"), "empty where processes is above 1", lambda bind, n: not bind or n == 1),
    Constraint(
        ("kv_events_allow", "kv_events_bind"),
        "set with kv_events_bind, whose port it guards",
        lambda ranges, bind: bool(bind) or not ranges,
    ),
    Constraint(("worker_cert_file", "worker_key_file"), "set with worker_key_file", _both_or_neither),
    Constraint(("w_ttft", "w_tpot"), "above 0 where w_tpot is 0", lambda ttft, tpot: ttft or tpot),
    Constraint(
        ("tls_client_ca_file", "tls_cert_file"), "set with tls_cert_file", lambda ca, cert: bool(cert) or not ca
    ),
)
