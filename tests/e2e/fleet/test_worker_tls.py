"""TLS towards workers: whose certificate counts, which one is shown, and that turns go as over plain HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ppd.proxy.config import Mode
from ppd.proxy.failures import Phase
from ppd.proxy.fleet.worker import Role
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.engine.engine import SimEngine
from ppd.servers.sim.launch import running_engine
from tests.support.client_connections import on_both_planes
from tests.support.credentials import Authority, Certificate
from tests.support.proxy import ProxyClient, running_proxy

CHATS = b"POST /v1/chat/completions "
ENOUGH = 5  # refused handshakes: more than the probes that a worker may miss


@dataclass
class Heard:
    """One connection whose handshake was done: what the proxy said on it, and the name in the certificate it showed."""

    shown: str = ""
    data: bytes = b""


@dataclass
class TlsFront:
    """Speaks TLS for an engine. `context` is read anew for each connection."""

    engine: SimEngine
    context: ssl.SSLContext
    address: str
    refused: int = 0  # handshakes that came to nothing
    heard: list[Heard] = field(default_factory=list)

    @property
    def turns(self) -> list[int]:
        """How many turns each connection brought that brought any."""
        return [count for one in self.heard if (count := one.data.count(CHATS))]

    async def accept(self, listening: socket.socket) -> None:
        """Until it is cancelled, and with it everything that is open, be it a connection that nobody has served yet."""
        loop, opened = asyncio.get_running_loop(), list[socket.socket]()
        try:
            async with asyncio.TaskGroup() as serving:

                def take() -> None:
                    accepted, _ = listening.accept()
                    accepted.setblocking(False)
                    opened.append(accepted)
                    serving.create_task(self._serve(accepted))

                loop.add_reader(listening, take)
                try:
                    await asyncio.Event().wait()
                finally:
                    loop.remove_reader(listening)
        finally:
            for accepted in opened:
                accepted.close()

    async def _serve(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=self.context)
        except OSError:
            self.refused += 1
            accepted.close()
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        with contextlib.suppress(OSError):
            try:
                await self._relay(reader, writer)
            finally:
                transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        shown = writer.get_extra_info("peercert") or {}
        heard = Heard(dict(pair for (pair,) in shown.get("subject", ())).get("commonName", ""))
        self.heard.append(heard)
        host, _, port = self.engine.address.rpartition(":")
        inner, outer = await asyncio.open_connection(host, int(port))
        answering = asyncio.create_task(_pump(inner, writer))
        try:
            while data := await reader.read(65536):
                heard.data += data
                outer.write(data)
        finally:
            outer.transport.abort()
            await answering


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()


@asynccontextmanager
async def tls_worker(context: ssl.SSLContext) -> AsyncIterator[TlsFront]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        async with running_engine(SimConfig(role=Role.DECODE)) as engine:
            front = TlsFront(engine, context, f"127.0.0.1:{listening.getsockname()[1]}")
            accepting = asyncio.create_task(front.accept(listening))
            try:
                yield front
            finally:
                accepting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await accepting


@asynccontextmanager
async def proxied(*fronts: TlsFront, **settings: Any) -> AsyncIterator[ProxyClient]:
    """A proxy that knows them as static workers."""
    workers = tuple(f"D={front.address},tls=true" for front in fronts)
    settings = {"mode": Mode.ALWAYS_LOCAL, "probe_interval_s": 0.02, "spare_connections": 0, **settings}
    async with running_proxy(workers=workers, **settings) as (proxy, url, session):
        yield ProxyClient(proxy, url, session)


def state_of(client: ProxyClient, front: TlsFront) -> str:
    (view,) = [view for view in client.proxy.state.registry.views() if view.id == front.address]
    return view.state


async def is_up(client: ProxyClient, front: TlsFront) -> None:
    await client.until(lambda: state_of(client, front) == "up")


async def is_refused(client: ProxyClient, front: TlsFront) -> None:
    """Probed again and again in vain: it never heard a byte, so it was never up either."""
    await client.until(lambda: front.refused >= ENOUGH)
    assert (state_of(client, front), front.heard) == ("down", [])


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def showing(own: Certificate, *, asks_for: str = "") -> ssl.SSLContext:
    """A worker's side. asks_for: the authority of which the proxy must show a certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(own.cert, own.key)
    if asks_for:
        context.load_verify_locations(asks_for)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another authority, of the same name: only its key tells it apart."""
    return Authority(tmp_path_factory.mktemp("others"))


@pytest.fixture(scope="module")
def right(authority: Authority) -> Certificate:
    return authority.issue("worker")


@pytest.fixture(scope="module")
def wrong(authority: Authority, others: Authority) -> dict[str, Certificate]:
    """Certificates that a worker on 127.0.0.1 must not be believed."""
    return {
        "another authority's": others.issue("worker"),
        "another host's": authority.issue("elsewhere", host="127.0.0.2"),
    }


# -- the worker's certificate


@pytest.mark.parametrize("spare", [0, 2])
@on_both_planes
async def test_turns_go_over_tls_and_the_second_over_the_connection_of_the_first(
    authority: Authority, right: Certificate, spare: int
) -> None:
    async with (
        tls_worker(showing(right)) as front,
        proxied(front, worker_ca_file=authority.ca, spare_connections=spare) as client,
    ):
        await is_up(client, front)
        long = chat("a word " * 4_000)  # more than one record of TLS
        async with client.session.post(
            f"http://{front.engine.address}/v1/chat/completions",
            json={"model": "sim", "messages": long, "max_tokens": 24, "temperature": 0},
        ) as response:
            expected = (await response.json())["choices"][0]["message"]["content"]
        whole = await client.chat(long)
        assert (whole.status, whole.text, front.turns) == (200, expected, [1])
        assert await streamed(client, long) == expected
        assert front.turns == [2]


async def streamed(client: ProxyClient, messages: list[dict[str, str]]) -> str:
    """The text of a stream, which must be whole."""
    body = {"model": "sim", "messages": messages, "max_tokens": 24, "temperature": 0, "stream": True}
    async with client.session.post(client.base_url + "/v1/chat/completions", json=body) as response:
        assert response.status == 200
        *events, end, rest = (await response.text()).split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    choices = [choice for event in events for choice in json.loads(event.removeprefix("data: "))["choices"]]
    assert len(choices) > 1
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize("shown", ["another authority's", "another host's"])
@on_both_planes
async def test_a_worker_of_another_certificate_is_never_up_and_gets_no_turn(
    authority: Authority, right: Certificate, wrong: dict[str, Certificate], shown: str
) -> None:
    async with (
        tls_worker(showing(right)) as good,
        tls_worker(showing(wrong[shown])) as bad,
        proxied(good, bad, worker_ca_file=authority.ca) as client,
    ):
        await is_up(client, good)
        for turn in range(8):
            assert (await client.chat(chat(f"{turn}"))).status == 200
        await is_refused(client, bad)


async def test_alone_it_leaves_the_proxy_without_a_worker(authority: Authority, wrong: dict[str, Certificate]) -> None:
    async with (
        tls_worker(showing(wrong["another authority's"])) as bad,
        proxied(bad, worker_ca_file=authority.ca, queue_timeout_s=0.1) as client,
    ):
        await is_refused(client, bad)
        assert (await client.chat(chat("hi"))).status == 503
        await is_refused(client, bad)


@pytest.mark.parametrize("shown", ["another authority's", "another host's"])
@on_both_planes
async def test_a_worker_that_was_up_gets_no_turn_over_another_certificate(
    authority: Authority, right: Certificate, wrong: dict[str, Certificate], shown: str
) -> None:
    """A turn's own connection looks at the certificate too, whatever the last probe has found."""
    async with (
        tls_worker(showing(right)) as front,
        proxied(front, worker_ca_file=authority.ca, probe_interval_s=3600.0, queue_timeout_s=0.2) as client,
    ):
        await is_up(client, front)
        front.context = showing(wrong[shown])
        turn = await client.chat(chat("hi"))
        await client.until(lambda: front.refused > 0)
        assert (turn.status, front.turns, front.refused) == (503, [], 1), "it waits for a worker that can be asked"
        (failed,) = (await client.receipt(turn))["legs"]
        assert failed["phase"] == Phase.CONNECT


@on_both_planes
async def test_without_an_authority_of_its_own_the_systems_count(right: Certificate) -> None:
    async with tls_worker(showing(right)) as front, proxied(front) as client:
        await is_refused(client, front)


# -- the proxy's certificate


@on_both_planes
async def test_a_worker_that_asks_for_the_proxys_certificate_gets_it(
    authority: Authority, others: Authority, right: Certificate
) -> None:
    own = others.issue("the proxy")  # workers may trust another authority than the proxy does
    files = {"worker_ca_file": authority.ca, "worker_cert_file": own.cert, "worker_key_file": own.key}
    async with tls_worker(showing(right, asks_for=others.ca)) as front, proxied(front, **files) as client:
        await is_up(client, front)
        assert (await client.chat(chat("hi"))).status == 200
        assert front.turns == [1]
        assert {one.shown for one in front.heard} == {"the proxy"}


async def test_a_renewed_certificate_of_the_proxy_is_shown_to_workers(
    authority: Authority, right: Certificate, tmp_path: Path
) -> None:
    mine = Authority(tmp_path)
    own, renewed = mine.issue("the proxy"), mine.issue("the proxy, renewed")
    files = {"worker_ca_file": authority.ca, "worker_cert_file": own.cert, "worker_key_file": own.key}
    context = showing(right, asks_for=mine.ca)
    async with tls_worker(context) as front, proxied(front, keepalive_s=0.02, **files) as client:
        await is_up(client, front)
        shutil.copyfile(renewed.cert, own.cert)
        shutil.copyfile(renewed.key, own.key)
        async with asyncio.timeout(60):
            while front.heard[-1].shown == "the proxy":
                await asyncio.sleep(0.05)  # no connection of a turn is kept for so long
                assert (await client.chat(chat("hi"))).status == 200
        assert {one.shown for one in front.heard} == {"the proxy", "the proxy, renewed"}


@pytest.mark.parametrize("shown", ["none", "another authority's"])
@on_both_planes
async def test_a_worker_that_does_not_get_the_certificate_it_asks_for_is_not_used(
    authority: Authority, right: Certificate, tmp_path: Path, shown: str
) -> None:
    files = {"worker_ca_file": authority.ca}
    if shown != "none":
        own = Authority(tmp_path).issue("the proxy")
        files |= {"worker_cert_file": own.cert, "worker_key_file": own.key}
    async with (
        tls_worker(showing(right)) as good,
        tls_worker(showing(right, asks_for=authority.ca)) as strict,
        proxied(good, strict, **files) as client,
    ):
        await is_up(client, good)
        for turn in range(8):
            assert (await client.chat(chat(f"{turn}"))).status == 200
        await is_refused(client, strict)
