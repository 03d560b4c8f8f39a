"""What a connector must know of a worker besides its HTTP address: the forms that such values may have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ..config import PORT_PATTERN
from ..fleet.worker import Role


class Coordinate(NamedTuple):
    """One value, under the name that heartbeats and the config give it."""

    allowed: str  # in words, for error messages
    pattern: re.Pattern[str]
    needed_of: frozenset[Role] = frozenset()  # these take no part in a SPLIT without it; of others there is a default

    def of(self, *roles: Role) -> Coordinate:
        """The same, needed of workers with these roles."""
        return self._replace(needed_of=frozenset(roles))


NO_COORDINATES: Mapping[str, Coordinate] = MappingProxyType({})

# Values are printable, have no spaces and at most 256 characters: see `discovery.heartbeat`.
ADDRESS = Coordinate("host:port, with a port from 1 to 65535", re.compile(rf"\S+:{PORT_PATTERN}"))
HOST = Coordinate("a host", re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]"))
PORT = Coordinate("a port from 1 to 65535", re.compile(PORT_PATTERN))
PORTS = Coordinate(
    "a port, or one of each rank as 7300+7301", re.compile(rf"{PORT_PATTERN}(?:\+{PORT_PATTERN}){{0,63}}")
)
COUNT = Coordinate("a number from 1 to 9999", re.compile(r"[1-9][0-9]{0,3}"))
RANK = Coordinate("a number from 0 to 9999", re.compile(r"0|[1-9][0-9]{0,3}"))
ENGINE = Coordinate("an engine's id", re.compile(r"[A-Za-z0-9_.:-]+"))
YES = Coordinate("true", re.compile("true"))
SWITCH = Coordinate("true or false", re.compile("true|false"))
ENDPOINT = Coordinate(
    "an endpoint such as tcp://host:port", re.compile(rf"[A-Za-z0-9_.:/\[\]-]{{1,250}}:{PORT_PATTERN}")
)
