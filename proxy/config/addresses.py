"""Addresses as a config writes them: ranges, hosts, ports, and origins of web pages."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from ..errors import ConfigError

# From 1 to 65535: the C library takes what is above modulo 65536.
PORT_PATTERN = r"(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6(?:[0-4][0-9]{3}|5(?:[0-4][0-9]{2}|5(?:[0-2][0-9]|3[0-5]))))"
ANY_ORIGIN = "*"
_OF_A_HOST = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENODEV, errno.EINVAL)  # ENODEV and EINVAL are ZeroMQ's
_ORIGIN = re.compile(
    rf"(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::{PORT_PATTERN})?"
)


def are_origins(texts: Sequence[str]) -> bool:
    return tuple(texts) == (ANY_ORIGIN,) or all(map(_ORIGIN.fullmatch, texts))


def are_ranges(texts: Iterable[str]) -> bool:
    try:
        return all(map(ipaddress.ip_network, texts))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class _SystemError(Protocol):
    """An OSError, or ZeroMQ's."""

    @property
    def errno(self) -> int | None: ...
    @property
    def strerror(self) -> str | None: ...


def cannot_listen(port_key: str, port: int, host_key: str, host: str, error: _SystemError) -> ConfigError:
    """What to change where nothing can be bound: the host if it is none of this machine's, else the port."""
    code = error.errno or 0
    why = os.strerror(code) if code > 0 else error.strerror  # below 0 are the resolver's
    if code <= 0 or code in _OF_A_HOST:
        told = f"{host_key} = {host!r}: must be a name or an address of this machine ({why})"
        return ConfigError(told, param=host_key)
    return ConfigError(f"{port_key} = {port}: must be a free port on {host} ({why})", param=port_key)


def host_and_port(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address, whether the host has some or not."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def is_ipv6(endpoint: str, resolve: Callable[..., Iterable[Any]] = socket.getaddrinfo) -> bool:
    """Whether ZeroMQ reaches this endpoint, or `host:port`, by IPv6 alone. Where it is a name, waits for the resolver.

    ZeroMQ looks for addresses of one kind; told to take IPv6 too, it would take no other of a name that has both.
    """
    host = endpoint.rpartition("://")[2].rpartition(":")[0]
    if host.startswith("["):
        return True
    try:
        return {family for family, *_ in resolve(host, None, type=socket.SOCK_STREAM)} == {socket.AF_INET6}
    except (OSError, UnicodeError):  # it may be known later, and then usually by IPv4
        return False
