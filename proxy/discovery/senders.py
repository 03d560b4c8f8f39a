"""Who may announce which worker: by the sender's key, by its address, and by who announced the worker before.

A worker that the config names is spoken of only from its own address, or with a known key: its agent may drain it, a
stranger may not. Any other worker belongs to the first key or address that announced it, and always to its own address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace as replace_worker

from msgspec.structs import replace

from ..config import ProxyConfig, is_loopback
from ..errors import FormatError
from ..fleet.registry import Registry
from ..fleet.worker import Announcement, Source, Worker, WorkerId

ANNOUNCED_LIMIT = 20_000  # workers; beyond it no new one is taken
LOOKUP_KEPT_S = 60.0  # for which the addresses of a host name stand

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class Senders:
    """Checks announcements; FormatError says what a refused sender did wrong."""

    def __init__(self, config: ProxyConfig, registry: Registry, now: Callable[[], float]) -> None:
        self._registry = registry
        self._needs_key = bool(config.curve_port)
        self._allowed = [ipaddress.ip_network(text) for text in config.heartbeat_allow]
        # TCP shows that a sender is at its address, and the operator has said which addresses are the fleet's.
        self._is_guarded = bool(config.heartbeat_allow) or is_loopback(config.heartbeat_host)
        self._hosts = HostAddresses(now)
        self._agents = Owners(config.worker_ttl_s, now)
        self._engines = Owners(config.worker_ttl_s, now)  # of pings

    def close(self) -> None:
        self._hosts.close()

    def checked(self, announcement: Announcement, sender: str, key: str | None) -> Announcement:
        """The announcement, with whether its worker is trusted. key: the sender's, on the encrypted port."""
        worker = announcement.worker
        self._check_port(worker, key)
        if self._allowed:
            self._check_ranges(worker, sender)
        known = self._registry.view(worker.id)
        if known is None and len(self._registry) >= ANNOUNCED_LIMIT:
            raise FormatError(f"heartbeat: {ANNOUNCED_LIMIT} workers are known, and no more are taken")
        is_static = known is not None and known.worker.source is Source.STATIC
        if worker.source is Source.PING and known is not None and known.worker.source is not Source.PING:
            return announcement  # it changes nothing
        is_own = key is None and self._hosts.is_own(worker.address, sender, looks_up=is_static)
        if is_static and key is None and not is_own:
            raise FormatError("heartbeat: only its own address, or a known key, may announce a worker of the config")
        owners = self._engines if worker.source is Source.PING else self._agents
        if not owners.may_speak(worker.id, key or sender, is_own=is_own):
            raise FormatError("heartbeat: another key or address announced this worker")
        if announcement.leaving:
            owners.release(worker.id)
        return replace(announcement, worker=replace_worker(worker, is_trusted=key is not None or self._is_guarded))

    def check_report(self, sender: str, key: str | None) -> None:
        """Of a turn, by a sidecar: whoever may announce a worker may tell what it did."""
        if self._needs_key and key is None:
            raise FormatError("turn report: sidecars must use curve_port")
        address = _ip(sender)
        if self._allowed and not (address and any(address in network for network in self._allowed)):
            raise FormatError("turn report: the sender is not in heartbeat_allow")

    def _check_port(self, worker: Worker, key: str | None) -> None:
        if self._needs_key and key is None:
            if worker.source is Source.AGENT:
                raise FormatError("heartbeat: agents must use curve_port")
            if not self._allowed:
                raise FormatError("ping: with curve_port, engines' pings are taken only with heartbeat_allow set")

    def _check_ranges(self, worker: Worker, sender: str) -> None:
        for what, host in (("sender", sender), ("http_address", _host(worker.address))):
            address = _ip(host)
            if address is None:
                raise FormatError(f"{what}: must be an IP address while heartbeat_allow is set")
            if not any(address in network for network in self._allowed):
                raise FormatError(f"{what}: not in heartbeat_allow")


class Owners:
    """Which key or address owns each worker; one that is silent for `ttl_s` loses it. `now`: monotonic seconds."""

    def __init__(self, ttl_s: float, now: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._now = now
        self._owners: dict[WorkerId, tuple[str, float]] = {}  # the longest unheard first

    def may_speak(self, worker_id: WorkerId, speaker: str, *, is_own: bool = False) -> bool:
        """Whether this speaker may announce the worker; if so it owns it from now on. is_own: it is at its address."""
        now_s = self._now()
        while self._owners:
            oldest = next(iter(self._owners))
            if now_s - self._owners[oldest][1] <= self._ttl_s:
                break
            del self._owners[oldest]
        if not is_own and self._owners.get(worker_id, (speaker, now_s))[0] != speaker:
            return False
        self._owners.pop(worker_id, None)
        self._owners[worker_id] = (speaker, now_s)
        return True

    def release(self, worker_id: WorkerId) -> None:
        """The owner gives the worker up: the next one to announce it owns it."""
        self._owners.pop(worker_id, None)


class Rivals:
    """Agents that announce one worker in turn, so that each undoes what the other has said."""

    def __init__(self) -> None:
        # The connection before the last one, the last one, and whether these two were told of.
        self._heard: dict[WorkerId, tuple[bytes, bytes, bool]] = {}

    def are_new(self, worker_id: WorkerId, connection: bytes) -> bool:
        """Once for each worker: whether a heartbeat has come on the connection before the last one again, so that two
        agents announce it. One that restarts, or connects again, never returns to its old connection."""
        before, last, is_told = self._heard.get(worker_id, (b"", b"", False))
        if connection == last or is_told:
            return False
        self._heard[worker_id] = last, connection, connection == before
        if len(self._heard) > ANNOUNCED_LIMIT:
            del self._heard[next(iter(self._heard))]
        return connection == before

    def forget(self, worker_id: WorkerId) -> None:
        self._heard.pop(worker_id, None)


class HostAddresses:
    """Whether a sender is at a worker's address. Names are looked up in the background: a new one has none yet."""

    def __init__(self, now: Callable[[], float], most: int = ANNOUNCED_LIMIT) -> None:
        """most: names that are known; of more the one that was looked up longest ago is forgotten."""
        self._now = now
        self._most = most
        self._found: dict[str, tuple[Sequence[IPAddress], float]] = {}  # each until when it stands
        self._lookups: dict[str, asyncio.Task[None]] = {}

    def close(self) -> None:
        for task in self._lookups.values():
            task.cancel()

    def is_own(self, address: str, sender: str, *, looks_up: bool) -> bool:
        """looks_up: also where the address has a host's name."""
        host, there = _host(address), _ip(sender)
        if there is None:
            return False
        here = _ip(host)
        addresses = (here,) if here is not None else self._of_name(host) if looks_up else ()
        return there in addresses or (any(map(_is_this_machine, addresses)) and _is_this_machine(there))

    def _of_name(self, name: str) -> Sequence[IPAddress]:
        found, until_s = self._found.get(name, ((), -math.inf))
        if self._now() >= until_s and name not in self._lookups:
            task = self._lookups[name] = asyncio.get_running_loop().create_task(self._look_up(name))
            task.add_done_callback(lambda _: self._lookups.pop(name, None))
        return found

    async def _look_up(self, name: str) -> None:
        try:
            answers = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            answers = []
        addresses = [address for answer in answers if (address := _ip(str(answer[4][0]))) is not None]
        self._found.pop(name, None)
        self._found[name] = (addresses, self._now() + LOOKUP_KEPT_S)
        if len(self._found) > self._most:
            del self._found[next(iter(self._found))]


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _ip(host: str) -> IPAddress | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_this_machine(address: IPAddress) -> bool:
    """Whether the address is one of this machine's: an agent beside the proxy may reach it through any of them."""
    if address.is_loopback or address.is_unspecified:
        return True
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True
