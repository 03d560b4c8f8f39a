"""Who may announce which worker, on a clock that stands still."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ppd.proxy.config import ProxyConfig
from ppd.proxy.discovery import senders
from ppd.proxy.discovery.senders import HostAddresses, Owners, Senders
from ppd.proxy.errors import FormatError
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import Announcement, Role, Source, Worker, WorkerId
from tests.support.clock import FakeClock

W, OTHER = WorkerId("10.0.0.1:80"), WorkerId("10.0.0.2:80")
OPEN: dict[str, Any] = {"heartbeat_host": "0.0.0.0", "heartbeat_open": True}
CURVE: dict[str, Any] = {"curve_port": 1, "curve_server_key_file": "k", "curve_clients_dir": "c"}
ALLOWED: dict[str, Any] = {"heartbeat_host": "0.0.0.0", "heartbeat_allow": ("10.0.0.0/24", "192.0.2.0/24")}


def said(address: str = W, source: Source = Source.AGENT, **changes: Any) -> Announcement:
    return Announcement(Worker(role=Role.DECODE, address=address, models=("m",), source=source), **changes)


class Bench:
    """A fleet that announces itself, and the senders' rights in it."""

    def __init__(self, clock: FakeClock, *workers: str, **settings: Any) -> None:
        self.registry = Registry()
        self.senders = Senders(ProxyConfig(**settings), self.registry, clock)
        for address in workers:
            self.registry.add_static(Worker(role=Role.DECODE, address=address), 0.0)

    def takes(self, announcement: Announcement, sender: str, key: str | None = None) -> bool:
        try:
            self.registry.apply(self.senders.checked(announcement, sender, key), 0.0)
        except FormatError:
            return False
        return True


@pytest.mark.parametrize(
    ("address", "sender", "key", "taken"),
    [
        ("10.0.0.1:80", "10.0.0.1", None, True),
        ("10.0.0.1:80", "::ffff:10.0.0.1", None, True),
        ("10.0.0.1:80", "10.0.0.2", None, False),
        ("10.0.0.1:80", "127.0.0.1", None, False),
        ("10.0.0.1:80", "None", None, False),
        ("10.0.0.1:80", "10.0.0.2", "a known key", True),
        ("127.0.0.1:80", "127.0.0.1", None, True),
        ("127.0.0.5:80", "127.0.0.1", None, True),
        ("localhost:80", "10.0.0.1", None, False),
        ("127.0.0.1:80", "10.0.0.1", None, False),
        ("[::1]:80", "127.0.0.1", None, True),
        ("[2001:db8::1]:80", "2001:db8::1", None, True),
        ("[2001:db8::1]:80", "2001:db8::2", None, False),
    ],
)
@pytest.mark.parametrize("says", ["draining", "leaving", "load"])
def test_a_worker_of_the_config_is_spoken_of_from_its_own_address_or_with_a_known_key(
    clock: FakeClock, address: str, sender: str, key: str | None, taken: bool, says: str
) -> None:
    async def run() -> None:
        bench = Bench(clock, address, **OPEN)
        message = said(address, draining=says == "draining", leaving=says == "leaving")
        before = bench.registry.views()
        assert bench.takes(message, sender, key) is taken
        if not taken:
            assert bench.registry.views() == before

    asyncio.run(run())


async def test_so_many_names_of_hosts_are_known_and_the_oldest_go_first(clock: FakeClock) -> None:
    """Workers that come and go may each have one of their own."""
    hosts = HostAddresses(clock, most=2)
    for name in ("localhost", "LocalHost", "LOCALHOST"):
        hosts.is_own(f"{name}:80", "127.0.0.1", looks_up=True)
        await asyncio.gather(*hosts._lookups.values())
    assert list(hosts._found) == ["LocalHost", "LOCALHOST"]


async def test_the_name_of_a_workers_host_is_looked_up_meanwhile(clock: FakeClock) -> None:
    bench = Bench(clock, "localhost:80", **OPEN)
    assert not bench.takes(said("localhost:80"), "127.0.0.1"), "its address is not known yet"
    await asyncio.gather(*bench.senders._hosts._lookups.values())
    assert bench.takes(said("localhost:80"), "127.0.0.1")
    assert not bench.takes(said("localhost:80", draining=True), "10.0.0.1")
    bench.senders.close()


def test_an_announced_worker_is_its_first_senders_and_always_its_own(clock: FakeClock) -> None:
    bench = Bench(clock, **OPEN)
    assert bench.takes(said(), "192.0.2.7"), "an agent behind another address"
    assert not bench.takes(said(leaving=True), "192.0.2.8")
    assert bench.takes(said(draining=True), "192.0.2.7")
    assert bench.takes(said(), "10.0.0.1")
    assert not bench.takes(said(draining=True), "192.0.2.7")
    assert bench.takes(said(leaving=True), "10.0.0.1")
    assert bench.takes(said(), "192.0.2.8"), "it was given up"


def test_pings_do_not_take_a_worker_from_its_agent_nor_from_another_engine(clock: FakeClock) -> None:
    bench = Bench(clock, **OPEN)
    assert bench.takes(said(source=Source.PING), "192.0.2.7")
    assert not bench.takes(said(source=Source.PING), "192.0.2.8")
    assert bench.takes(said(), "192.0.2.9")
    assert bench.takes(said(source=Source.PING), "192.0.2.8"), "it changes nothing"
    (view,) = bench.registry.views()
    assert view.worker.source is Source.AGENT


@pytest.mark.parametrize(
    ("settings", "sender", "key", "is_trusted"),
    [
        ({}, "127.0.0.1", None, True),  # only this machine reaches the port
        (OPEN, "10.0.0.1", None, False),
        (OPEN, "127.0.0.1", None, False),
        (ALLOWED, "10.0.0.1", None, True),
        ({**OPEN, **CURVE}, "192.0.2.7", "a known key", True),
    ],
)
def test_a_worker_is_trusted_whose_sender_is_known(
    clock: FakeClock, settings: dict[str, Any], sender: str, key: str | None, is_trusted: bool
) -> None:
    bench = Bench(clock, **settings)
    assert bench.takes(said(), sender, key)
    (view,) = bench.registry.views()
    assert view.worker.is_trusted is is_trusted


def test_a_worker_of_the_config_stays_trusted_whoever_speaks_of_it(clock: FakeClock) -> None:
    bench = Bench(clock, W, **OPEN)
    assert bench.takes(said(), "10.0.0.1")
    (view,) = bench.registry.views()
    assert view.worker.is_trusted


def test_strangers_workers_do_not_pile_up(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(senders, "ANNOUNCED_LIMIT", 3)
    bench = Bench(clock, **OPEN)
    assert [bench.takes(said(f"10.0.0.{number}:80"), "192.0.2.7") for number in range(5)] == [True] * 3 + [False] * 2
    assert bench.takes(said("10.0.0.0:80", leaving=True), "192.0.2.7")
    assert bench.takes(said("10.0.0.4:80"), "192.0.2.7")


@pytest.fixture
def owners(clock: FakeClock) -> Owners:
    return Owners(30.0, clock)


def test_a_worker_is_its_first_keys(owners: Owners) -> None:
    assert owners.may_speak(W, "a")
    assert not owners.may_speak(W, "b")
    assert owners.may_speak(W, "a")
    assert owners.may_speak(OTHER, "b")


@pytest.mark.parametrize(("silent_s", "may"), [(30.0, False), (30.1, True)])
def test_a_silent_owner_has_lost_its_worker(owners: Owners, clock: FakeClock, silent_s: float, may: bool) -> None:
    owners.may_speak(W, "a")
    clock.advance(silent_s)
    assert owners.may_speak(W, "b") is may


def test_who_is_refused_keeps_nobody_waiting_longer(owners: Owners, clock: FakeClock) -> None:
    owners.may_speak(W, "a")
    owners.may_speak(OTHER, "c")
    for _ in range(4):
        clock.advance(10)
        owners.may_speak(OTHER, "c")
        may = owners.may_speak(W, "b")
    assert may


def test_a_worker_that_is_given_up_is_anyones(owners: Owners) -> None:
    owners.may_speak(W, "a")
    owners.release(W)
    assert owners.may_speak(W, "b")
