"""Which workers a request's head may name. What it names is sent the prompt, so the operator says who may be."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppd.proxy.discovery.heartbeat import check_address
from ppd.proxy.errors import ConfigError, Forbidden, FormatError
from ppd.proxy.runtime.watched_files import WATCH_EVERY_S, WatchedFiles

log = logging.getLogger(__name__)

ENTRIES = "address ranges such as 10.0.0.0/24, or host:port"
FILE_LIMIT_BYTES = 1024 * 1024
SHOWN_CHARACTERS = 100


@dataclass(frozen=True, slots=True)
class Allowed:
    """Workers that may be named: by the range of its IP address, on any port, or as host:port, letter by letter.

    Names are not looked up: who answers for a name could change what it means.
    """

    ranges: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = ()
    addresses: frozenset[str] = frozenset()

    @classmethod
    def of(cls, entries: Sequence[str], flag: str = "allow_prefill") -> Allowed:
        """ConfigError, which names the flag, for an entry that is neither."""
        ranges, addresses = [], []
        for entry in entries:
            try:
                ranges.append(ipaddress.ip_network(entry))
                continue
            except ValueError:
                pass
            try:
                addresses.append(check_address(entry.lower(), flag))
            except FormatError:
                raise _refused(flag, entry, ENTRIES) from None
        return cls(tuple(ranges), frozenset(addresses))

    def covers(self, other: Allowed) -> bool:
        """Whether it has all entries of the other one."""
        return set(self.ranges) >= set(other.ranges) and self.addresses >= other.addresses

    def has(self, address: str) -> bool:
        """address: host:port, in lower case."""
        if address in self.addresses:
            return True
        try:
            host = ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
        except ValueError:
            return False
        host = getattr(host, "ipv4_mapped", None) or host
        return any(host in each for each in self.ranges)


class AllowList:
    """What a flag says: its entries, or a file of them, one a line, which is read again when it changes."""

    def __init__(self, text: str = "", kind: str = "prefill") -> None:
        """ConfigError for what is neither. Empty: nobody is allowed. kind: of server; prefill or encoder."""
        self.text = text
        self._kind = kind
        self._flag = f"allow_{kind}"
        self._file: Path | None = None
        try:
            self.allowed = Allowed.of(entries_of(text), self._flag)
        except ConfigError as exc:
            if not os.path.isfile(text):  # noqa: PTH113, as Path's raises for a name that no file can have
                raise ConfigError(f"{exc.message}; or a file of these, one a line", param=exc.param) from None
            self._file = Path(text)
            self._watched = WatchedFiles(self._file)
            self.allowed = self._read(self._file)

    async def watch(self, every_s: float = WATCH_EVERY_S) -> None:
        while self._file is not None:
            await asyncio.sleep(every_s)
            self.look()

    def look(self) -> None:
        """Reads the file again if it has changed; what cannot be used leaves all as it was."""
        if self._file is None or not self._watched.are_new():
            return
        try:
            allowed = self._read(self._file)
        except ConfigError as exc:
            log.error("the changed list %s is not used: %s", self._flag, exc.message)
            return
        if not allowed.covers(self.allowed) and not self._watched.have_rested():
            return  # it may be cut between two lines, and the rest still come
        self.allowed = allowed
        log.info("the changed list %s is in force", self._flag)

    def check(self, named: str, header: str) -> str:
        """The address that a header names, in lower case; Forbidden if it is not allowed."""
        address = named.lower()
        try:
            allowed = self.allowed.has(check_address(address, header))
        except FormatError:
            allowed = False
        if not allowed:
            log.warning("%r is not in %s: its turn is refused", address[:SHOWN_CHARACTERS], self._flag)
            said = f"{header}: this {self._kind} server is not allowed"
            raise Forbidden(said, param=header, code=f"{self._kind}_not_allowed")
        return address

    def _read(self, file: Path) -> Allowed:
        try:
            with file.open("rb") as opened:
                text = opened.read(FILE_LIMIT_BYTES + 1).decode()
        except (OSError, UnicodeDecodeError):
            raise _refused(self._flag, str(file), "a text file that can be read") from None
        if len(text) > FILE_LIMIT_BYTES:
            raise _refused(self._flag, str(file), f"at most {FILE_LIMIT_BYTES} bytes")
        entries = entries_of(",".join(line.partition("#")[0] for line in text.splitlines()))
        if not entries:  # an editor may have left it so
            raise _refused(self._flag, str(file), f"a file with an entry at least: {ENTRIES}")
        return Allowed.of(entries, self._flag)


def entries_of(text: str) -> list[str]:
    return [entry for part in text.split(",") if (entry := part.strip())]


def _refused(flag: str, value: str, allowed: str) -> ConfigError:
    return ConfigError(f"{flag} = {value[:SHOWN_CHARACTERS]!r}: must be {allowed}", param=flag)
