"""The P of a turn, as the picker names it in the request's head."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from ppd.proxy.connectors import usual_engine
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.upstream.sidecar import PREFILLER

from .allow_list import AllowList, entries_of

HEADER = PREFILLER  # host:port, or several with commas between


class Prefills:
    """Finds the P of each turn."""

    def __init__(
        self,
        allow_list: AllowList,
        *,
        connector: str,
        known: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
        tls: bool,
        samples: bool,
        choice: Callable[[Sequence[str]], str] = random.choice,
    ) -> None:
        """known: what the connector must know of some P, by host:port, which may be named as if they were listed.

        samples: of several that are named it takes any; else the first.
        """
        self._allow_list = allow_list
        self._connector = connector
        self._known = known
        self._tls = tls
        self._choice = choice if samples else None

    def named(self, headers: Mapping[str, str]) -> WorkerView | None:
        """None: the engine computes the prompt itself. Forbidden for a P that is not allowed."""
        named = entries_of(headers.get(HEADER, ""))
        if not named:
            return None
        chosen = named[0] if self._choice is None else self._choice(named)
        address = chosen.lower() if chosen.lower() in self._known else self._allow_list.check(chosen, HEADER)
        worker = Worker(
            role=Role.PREFILL,
            address=address,
            connector=self._connector,
            engine=usual_engine(self._connector),
            coordinates=dict(self._known.get(address, {})),
            tls=self._tls,
        )
        return WorkerView(worker=worker, name="P", incarnation="")
