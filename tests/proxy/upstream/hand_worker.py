"""A worker of which a test does each step itself, over the sockets of each data plane."""

from __future__ import annotations

import asyncio
import inspect
import socket
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from ppd.proxy import plane
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.runtime.process import new_loop
from ppd.proxy.runtime.tls import Tls
from ppd.proxy.upstream.call import Call
from ppd.proxy.upstream.client import Upstream
from ppd.proxy.upstream.pool import Pool
from tests.support.credentials import Authority, trusting
from tests.support.scripted_workers import PATIENT

RECEIVED_BYTES = 16 * 1024  # of a request, in the worker's kernel; the rest stays in the proxy's
KINDS = ("native", "direct", "direct with TLS")


class HandWorker:
    """Takes a connection, reads and says what the test wants, and nothing else. Its sockets block, in threads."""

    def __init__(self, authority: Authority | None) -> None:
        """authority: of the certificate that it shows; None: it speaks no TLS."""
        is_tls = authority is not None
        self._context = _context(authority) if authority else None
        self._listening = socket.socket()
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED_BYTES)
        self._listening.bind(("127.0.0.1", 0))
        self._listening.listen()
        self._open: list[socket.socket] = []
        self.worker = Worker(role=Role.DECODE, address=f"127.0.0.1:{self._listening.getsockname()[1]}", tls=is_tls)
        self._poller = plane.Poller() if plane.IS_BUILT and not is_tls and not _is_uvloop() else None
        self.upstream = Upstream(
            keepalive_s=60.0,
            may_resend=lambda: False,
            tls=Tls(lambda: trusting(authority)) if authority else None,
            poller=self._poller,
        )

    @property
    def pool(self) -> Pool:
        return self.upstream._pool(self.worker)

    @property
    def kept(self) -> int:
        return len(self.pool._idle)

    async def accept(self) -> socket.socket:
        return await asyncio.to_thread(self._accept)

    def _accept(self) -> socket.socket:
        self._listening.settimeout(60)
        accepted, _ = self._listening.accept()
        accepted.settimeout(60)
        if self._context is not None:
            accepted = self._context.wrap_socket(accepted, server_side=True)
        self._open.append(accepted)
        return accepted

    def ask(
        self,
        body: bytes = b"{}",
        *,
        just_before: Callable[[], object] = bool,
        just_after: Callable[[], None] | None = None,
        **call: Any,
    ) -> asyncio.Task[tuple[int, bytes]]:
        """Status and body of an answer. just_before, just_after: what happens then, before the event loop goes on."""

        async def asked() -> tuple[int, bytes]:
            just_before()
            made = Call(self.worker, **call)
            async with self.upstream.answer(made, "/", body=body, timeouts=PATIENT, meanwhile=just_after) as answer:
                return answer.status, await answer.body()

        return asyncio.create_task(asked())

    async def close(self) -> None:
        await self.upstream.close()
        if self._poller is not None:
            self._poller.close()
        for each in (self._listening, *self._open):
            each.close()


async def head_of(connection: socket.socket) -> bytes:
    """The head of the next request, and no byte more."""

    def read() -> bytes:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            got = connection.recv(1)
            if not got:
                raise ConnectionError("the proxy has closed its connection")
            head += got
        return head

    return await asyncio.to_thread(read)


async def request_on(connection: socket.socket) -> bytes:
    """The body of the next request."""
    head = await head_of(connection)
    left, body = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]), b""

    def read() -> bytes:
        return connection.recv(left - len(body))

    while len(body) < left:
        body += await asyncio.to_thread(read)
    return body


Test = Callable[..., Coroutine[Any, Any, None]]


def on_each_plane(test: Test) -> Callable[..., None]:
    """The test gets a `HandWorker`; what an event loop could not tell anybody fails it."""

    def run(data_plane: str, tmp_path: Path, **given: Any) -> None:
        failures: list[Any] = []

        async def body() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
            worker = HandWorker(Authority(tmp_path) if data_plane.endswith("TLS") else None)
            try:
                async with asyncio.timeout(60):
                    await test(worker, **given)
            finally:
                await worker.close()

        is_native = data_plane == "native"
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop if is_native else new_loop) as runner:
            runner.run(body())
        assert failures == []

    _, *own = inspect.signature(test).parameters.values()
    wanted = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("data_plane", "tmp_path")]
    run.__signature__ = inspect.Signature([*wanted, *own])  # type: ignore[attr-defined]
    run.__doc__, run.__name__ = test.__doc__, test.__name__
    run.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
    marked: Callable[..., None] = pytest.mark.parametrize("data_plane", KINDS)(run)
    return marked


def _is_uvloop() -> bool:
    return isinstance(asyncio.get_running_loop(), uvloop.Loop)


def _context(authority: Authority) -> ssl.SSLContext:
    own = authority.issue("engine")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.cert, own.key)
    return context
