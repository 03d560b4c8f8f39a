"""Connected TCP sockets: one end under a transport of the event loop or of the poller, the other end plain."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import selectors
import socket
import struct
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from ppd.proxy.plane import IS_BUILT

if IS_BUILT:
    from ppd.proxy.plane.poller import Poller

needs_poller = pytest.mark.skipif(not IS_BUILT, reason="the compiled poller is not built here")
ROUNDS = 200_000  # of the event loop, until a test that waits for what does not come fails
A_FEW = 10  # rounds, after which nothing more may have happened
SMALL_BYTES = 16 * 1024  # of a socket's buffers: what is written is taken in many small parts
BIG = bytes(range(251)) * 4000  # more than both sockets hold

Act = Callable[["Recorder"], object]


class Recorder(asyncio.Protocol):
    """Keeps what a transport says, in order; `acts` are done as it says so, by the name of the method."""

    transport: asyncio.Transport

    def __init__(self, **acts: Act) -> None:
        self.acts = acts
        self.told: list[str] = []  # a run of `data_received` counts once
        self.data = bytearray()
        self.lost: list[Exception | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._act("connection_made")

    def data_received(self, data: bytes) -> None:
        self.data += data
        self._act("data_received")

    def eof_received(self) -> bool:
        return bool(self._act("eof_received"))

    def pause_writing(self) -> None:
        self._act("pause_writing")

    def resume_writing(self) -> None:
        self._act("resume_writing")

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)
        self._act("connection_lost")

    def _act(self, name: str) -> object:
        if self.told[-1:] != ["data_received"] or name != "data_received":
            self.told.append(name)
        return self.acts[name](self) if name in self.acts else None


def tcp_pair(*, buffer_bytes: int = 0) -> tuple[socket.socket, socket.socket]:
    """buffer_bytes: of the kernel, for what the first sends to the second; 0: as it is."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.socket(proto=socket.IPPROTO_TCP)
        if buffer_bytes:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        ours.connect(listening.getsockname())
        peer, _ = listening.accept()
    ours.setblocking(False)
    peer.setblocking(False)
    return ours, peer


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def reset(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


async def until(condition: Callable[[], object]) -> None:
    for _ in range(ROUNDS):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError(f"what a test waits for has not come in {ROUNDS} rounds")


async def rounds(count: int = A_FEW) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def take(peer: socket.socket, size: int | None = None) -> bytes:
    """What comes, to its end or until there are `size` bytes."""
    taken = bytearray()

    def is_all() -> bool:
        with contextlib.suppress(BlockingIOError):
            part = peer.recv(65536)
            taken.extend(part)
            return not part or len(taken) == size
        return False

    await until(is_all)
    return bytes(taken)


@dataclass
class Ends:
    """Makes connections of one kind of transport, and ends what is left of them."""

    poller: Poller | None
    selector: selectors.BaseSelector | None  # None: the event loop has none
    failures: list[BaseException] = field(default_factory=list)  # told to the event loop
    _open: list[asyncio.Transport] = field(default_factory=list)
    _peers: list[socket.socket] = field(default_factory=list)

    async def adopt(self, ours: socket.socket, protocol: asyncio.Protocol) -> asyncio.Transport:
        if self.poller is not None:
            made: asyncio.Transport = self.poller.adopt(ours, protocol)
        else:
            made, _ = await asyncio.get_running_loop().create_connection(lambda: protocol, sock=ours)
        self._open.append(made)
        return made

    async def pair(
        self, protocol: asyncio.Protocol, *, buffer_bytes: int = 0
    ) -> tuple[asyncio.Transport, socket.socket]:
        ours, peer = tcp_pair(buffer_bytes=buffer_bytes)
        self._peers.append(peer)
        return await self.adopt(ours, protocol), peer

    def is_idle(self) -> bool:
        """The event loop would sleep."""
        return self.selector is None or not self.selector.select(0)

    async def close(self) -> None:
        for transport in self._open:
            if not transport.is_closing() or transport.get_write_buffer_size():  # else asyncio's own may fail
                transport.abort()
        for peer in self._peers:
            peer.close()
        if self.poller is not None:
            self.poller.close()
        await rounds()

    def heard(self, _: object, context: dict[str, Any]) -> None:
        self.failures.append(context.get("exception") or AssertionError(context["message"]))


Test = Callable[..., Coroutine[Any, Any, None]]
KINDS = {"asyncio": (False, False), "poller": (True, False), "poller on uvloop": (True, True)}


def _over(kinds: list[str], test: Test) -> Callable[..., None]:
    def run(kind: str, **given: Any) -> None:
        is_compiled, is_uvloop = KINDS[kind]
        if is_compiled and not IS_BUILT:
            pytest.skip("the compiled poller is not built here")
        if kind == "asyncio" and sys.version_info >= (3, 12):
            pytest.skip("from Python 3.12 on, asyncio's own writelines fails where nothing or an empty part is written")
        selector = None if is_uvloop else selectors.DefaultSelector()
        make = uvloop.new_event_loop if is_uvloop else partial(asyncio.SelectorEventLoop, selector)
        ends = Ends(Poller() if is_compiled else None, selector)

        async def body() -> None:
            asyncio.get_running_loop().set_exception_handler(ends.heard)
            try:
                await test(ends, **given)
            finally:
                await ends.close()
            assert ends.failures == []

        with asyncio.Runner(loop_factory=make) as runner:
            runner.run(body())

    _, *own = inspect.signature(test).parameters.values()
    named = inspect.Parameter("kind", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([named, *own])  # type: ignore[attr-defined]
    run.__doc__, run.__name__ = test.__doc__, test.__name__
    run.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
    marked: Callable[..., None] = pytest.mark.parametrize("kind", kinds)(run)
    return marked


def promised(test: Test) -> Callable[..., None]:
    """What asyncio promises: the same of its own transports and of the poller's."""
    return _over([*KINDS], test)


def of_the_poller(test: Test) -> Callable[..., None]:
    return _over([kind for kind, (is_compiled, _) in KINDS.items() if is_compiled], test)
