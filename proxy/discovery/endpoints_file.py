"""Workers from llm-d's `endpoints.yaml`, which its plugin `file-discovery` reads.

A label says which role a worker has: `llm-d.ai/role`, else `role`; one without either is a D.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ..config.yaml_document import YamlNode, read_yaml
from ..connectors import usual_connector
from ..connectors.nixl import Nixl
from ..errors import ConfigError, FormatError
from ..fleet.worker import Role, Source, Worker
from ..runtime.watched_files import WatchedFiles
from .heartbeat import PORT_LIMIT, check_labels

KEY: Final = "epp_config"  # which leads to the file
MOST_ENDPOINTS: Final = 10_000
ROLE_LABELS: Final = ("llm-d.ai/role", "role")
_PREFILL, _DECODE = "prefill", "decode"
_OLD_BOTH: Final = "both"


class EndpointsOfFile:
    """The file's workers, as they were last read. ConfigError, at the start too, where it cannot be used."""

    def __init__(self, path: str, is_watched: bool) -> None:
        self.path = path
        self.is_watched = is_watched
        self._watched = WatchedFiles(Path(path))  # made first, so that a change in between is seen
        self.workers = self._read()

    def are_new(self) -> bool:
        return self.is_watched and self._watched.are_new()

    def reread(self, *, may_be_empty: bool) -> bool:
        """False: it lacks workers that may still come. ConfigError, with nothing changed, where it cannot be used."""
        workers = self._read()
        if self.workers and not workers and not may_be_empty:
            raise ConfigError(f"{KEY}, {self.path}: none is left of {len(self.workers)} endpoints", param=KEY)
        lost = {worker.id for worker in self.workers} - {worker.id for worker in workers}
        if lost and not self._watched.have_rested():
            return False
        self.workers = workers
        return True

    def _read(self) -> tuple[Worker, ...]:
        document, _ = read_yaml(KEY, Path(self.path))
        return endpoints_in(document)


def endpoints_in(document: YamlNode) -> tuple[Worker, ...]:
    """ConfigError names the first entry that cannot be used, with its line."""
    listed = document.fields("endpoints").get("endpoints")
    nodes = [] if listed is None else listed.items()
    if listed is not None and len(nodes) > MOST_ENDPOINTS:
        raise listed.refused(f"must be at most {MOST_ENDPOINTS}")
    found, lines = dict[str, Worker](), dict[str, int]()
    for node in nodes:
        name, worker = _worker(node)
        for each in (name, worker.address):
            if each in lines:
                raise node.refused(f"{each} is in line {lines[each]} too")
            lines[each] = node.line
        found[worker.address] = worker
    return tuple(found.values())


def _worker(node: YamlNode) -> tuple[str, Worker]:
    """With its name, in its namespace."""
    fields = node.fields("name", "namespace", "address", "port", "labels")
    for name in ("name", "address", "port"):
        if name not in fields:
            raise node.refused(f"must have {name}")
    namespace = fields["namespace"].text() if "namespace" in fields else "default"
    labels = _labels(fields["labels"]) if "labels" in fields else {}
    role = _role(fields["labels"], labels) if labels else Role.DECODE
    worker = Worker(
        role=role,
        address=f"{_host(fields['address'])}:{_port(fields['port'])}",
        connector=Nixl.name if role is Role.REPLICA else usual_connector(role, ""),
        source=Source.STATIC,
        labels=labels,
    )
    return f"{namespace}/{fields['name'].text()}", worker


def _labels(node: YamlNode) -> dict[str, str]:
    try:
        return check_labels({name: value.text() for name, value in node.every_field().items()})
    except FormatError as exc:
        raise node.refused(exc.message) from None


def _host(node: YamlNode) -> str:
    try:
        address = ipaddress.ip_address(node.text("an IP address"))
    except ValueError:
        raise node.wrong("an IP address") from None
    return f"[{address}]" if address.version == 6 else str(address)


def _port(node: YamlNode) -> int:
    allowed = f"a whole number from 1 to {PORT_LIMIT}"
    text = str(node.value) if isinstance(node.value, int) else node.text(allowed)
    if not text.isascii() or not text.isdecimal() or len(text) > 5 or not 0 < int(text) <= PORT_LIMIT:
        raise node.wrong(allowed)
    return int(text)


def _role(node: YamlNode, labels: Mapping[str, str]) -> Role:
    label = next((label for label in ROLE_LABELS if label in labels), None)
    if label is None:
        return Role.DECODE
    phases = {_PREFILL, _DECODE} if labels[label] == _OLD_BOTH else set(labels[label].split("-"))
    if {_PREFILL, _DECODE} <= phases:
        return Role.REPLICA
    if _DECODE in phases:
        return Role.DECODE
    if _PREFILL in phases:
        return Role.PREFILL
    raise node.refused(f"{label} = {labels[label]!r}: must name prefill or decode; encoders take no part here")
