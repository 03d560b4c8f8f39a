"""The connections of a picker's ports, and how many there may be: they must not use up the process's open files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

LOOKED_AT = 8  # for one that may be closed


class OpenConnection(Protocol):
    @property
    def is_idle(self) -> bool: ...  # no call is under way

    def go_away(self) -> None: ...

    def close(self) -> None: ...  # once the gateway has taken what was written

    def evict(self) -> None: ...  # for another one


class OpenConnections:
    """At most `most`: then one without a call is closed for a new one, or the new one has no place.

    Whoever has been looked at goes to the end of the line, so all are looked at in turn.
    """

    def __init__(self, most: int = sys.maxsize) -> None:
        self._most = most
        self._line: dict[OpenConnection, None] = {}
        self._refused = 0
        self._evicted = 0

    def __iter__(self) -> Iterator[OpenConnection]:
        return iter(tuple(self._line))

    def __len__(self) -> int:
        return len(self._line)

    def add(self, connection: OpenConnection) -> bool:
        """False if there is no place for it."""
        if len(self._line) >= self._most and not self._evict():
            self._refused += 1
            return False
        self._line[connection] = None
        return True

    def discard(self, connection: OpenConnection) -> None:
        self._line.pop(connection, None)

    def gauges(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("ppd_picker_connections", "Gateways' connections that are open", len(self._line))
        yield CounterMetricFamily(
            "ppd_picker_connections_refused", "Gateways' connections above the limit on their number", self._refused
        )
        yield CounterMetricFamily(
            "ppd_picker_connections_evicted", "Gateways' idle connections closed for new ones", self._evicted
        )

    def _evict(self) -> bool:
        for connection in tuple(islice(self._line, LOOKED_AT)):
            del self._line[connection]
            if connection.is_idle:
                self._evicted += 1
                connection.evict()
                return True
            self._line[connection] = None
        return False
