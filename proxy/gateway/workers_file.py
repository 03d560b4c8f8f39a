"""The workers that Envoy may send turns to, in a file that it watches: an endpoint picker's fallbacks are known hosts.

Envoy's discovery of endpoints (EDS) over the file system: the file is replaced whole, and Envoy reads it at each such
move. https://www.envoyproxy.io/docs/envoy/latest/configuration/overview/xds_api#filesystem-subscriptions
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
from collections.abc import Iterable
from pathlib import Path

from ..errors import ConfigError
from ..fleet.registry import Registry
from ..fleet.worker import ANSWERING
from .envoy_tls import BY_TLS, MATCH

log = logging.getLogger(__name__)

CLUSTER = "picked"
_TLS = {"filter_metadata": {MATCH: BY_TLS}}
LOOK_EVERY_S = 0.1


class WorkersFile:
    """Written at the start, and again whenever a D or R has joined or left."""

    def __init__(self, path: Path, registry: Registry) -> None:
        self._path = path
        self._registry = registry
        self._written: tuple[tuple[str, bool], ...] | None = None
        self._has_failed = False

    def open(self) -> None:
        """ConfigError if it cannot be written."""
        try:
            self._write()
        except OSError as exc:
            said = f"picker_workers_file = {str(self._path)!r}: must be a file that can be written ({exc.strerror})"
            raise ConfigError(said, param="picker_workers_file") from exc

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        try:
            self._write()
        except OSError as exc:
            if not self._has_failed:
                log.error(
                    "picker_workers_file %s cannot be written, so Envoy does not know all workers: %s",
                    self._path,
                    exc.strerror,
                )
            self._has_failed = True
        else:
            self._has_failed = False

    def _write(self) -> None:
        views = self._registry.views()
        workers = (view.worker for view in views if view.role in ANSWERING)
        found = tuple(sorted((worker.address, worker.tls) for worker in workers))
        if found == self._written:
            return
        beside = self._path.with_name(f"{self._path.name}.new")
        beside.write_text(endpoints(found))
        beside.replace(self._path)
        self._written = found


def endpoints(workers: Iterable[tuple[str, bool]]) -> str:
    """As Envoy reads it, in JSON. workers: the address of each, and whether it speaks TLS.

    Workers by name are left out: Envoy takes IP addresses alone, or refuses the whole.
    """
    found = [
        {"endpoint": {"address": {"socket_address": at}}} | ({"metadata": _TLS} if tls else {})
        for address, tls in workers
        if (at := _socket_address(address))
    ]
    assignment = {
        "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": CLUSTER,
        "endpoints": [{"lb_endpoints": found}],
    }
    return json.dumps({"resources": [assignment]}, indent=1)


def _socket_address(address: str) -> dict[str, object] | None:
    host, _, port = address.rpartition(":")
    try:
        return {"address": str(ipaddress.ip_address(host.strip("[]"))), "port_value": int(port)}
    except ValueError:
        return None
