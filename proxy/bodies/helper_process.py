"""A second Python process that does what would keep the event loop for too long: one task after the other.

A task is a function of that process, known by its name. It gets a few bytes and a `SharedBytes`, and returns the same.
The two processes speak over a socket pair: a length and that many bytes, and beside them the descriptor of the shared
memory. The helper starts with its first task and ends when this process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping

from ..errors import Overloaded, PPDError
from ..runtime.loop_watch import time_limit
from .shared_bytes import STEP_BYTES, SharedBytes

log = logging.getLogger(__name__)

Task = Callable[[bytes, memoryview], tuple[bytes, bytes | None]]
"""From a task's arguments and the shared bytes to its result and, where there are any, new shared bytes."""

_LENGTH = struct.Struct("<I")
_NAME_BYTES = 16
LIMIT_S = 30.0  # of one task; what makes a task long is bounded, so more than this means that something is wrong
_NOTHING = memoryview(b"")


class HelperProcess:
    def __init__(self, module: str, name: str = "the body reader", limit_s: float = LIMIT_S) -> None:
        """module: its `main(fd)` calls `serve`. name: as the log has it. limit_s: of one task."""
        self._module = module
        self._name = name
        self._limit_s = limit_s
        self._lane = asyncio.Lock()  # one task at a time: others of this process must not wait for the processor
        self._tasks: set[asyncio.Task[tuple[bytes, SharedBytes | None]]] = set()
        self._process: asyncio.subprocess.Process | None = None
        self._killed: list[asyncio.subprocess.Process] = []  # those that may not have ended yet
        self._socket: socket.socket | None = None

    @property
    def asked(self) -> int:
        """Tasks under way, with those that wait for others."""
        return len(self._tasks)

    async def ask(
        self, name: str, arguments: bytes, shared: SharedBytes | None = None, limit_s: float | None = None
    ) -> tuple[bytes, SharedBytes | None]:
        """Overloaded (503) where the helper ended or hung. Whoever stops waiting does not stop the task."""
        task = asyncio.create_task(self._in_lane(name, arguments, shared, limit_s or self._limit_s))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: asyncio.Task[tuple[bytes, SharedBytes | None]]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may have left: then nobody else takes it

    async def _in_lane(
        self, name: str, arguments: bytes, shared: SharedBytes | None, limit_s: float
    ) -> tuple[bytes, SharedBytes | None]:
        async with self._lane:
            if self._process is None or self._process.returncode is not None:
                await self._start()
            try:
                async with time_limit(limit_s):
                    await self._send(name, arguments, shared)
                    return await self._receive()
            except (OSError, EOFError, TimeoutError) as exc:
                self._end()
                log.error("the process of %s failed: %s", self._name, type(exc).__name__)
                raise Overloaded("the body could not be read now", reason="body_reader", retry_after_s=1.0) from exc
            except asyncio.CancelledError:
                self._end()
                raise

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end()
        await asyncio.gather(*(process.wait() for process in self._killed))

    def _end(self) -> None:
        process, self._process = self._process, None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            self._killed = [*(one for one in self._killed if one.returncode is None), process]

    async def _start(self) -> None:
        self._end()
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", f"from {self._module} import main; main({theirs.fileno()})"),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        except OSError as exc:
            ours.close()
            raise PPDError(f"no process can be started for {self._name}") from exc
        finally:
            theirs.close()
        ours.setblocking(False)
        self._socket = ours

    async def _send(self, name: str, arguments: bytes, shared: SharedBytes | None) -> None:
        sock = self._socket
        assert sock is not None, "it is started"
        head = _LENGTH.pack(len(arguments)) + name.encode().ljust(_NAME_BYTES)
        fds = [] if shared is None else [shared.fd]
        socket.send_fds(sock, [head], fds)  # the socket's buffer is empty, so it takes these few bytes at once
        await asyncio.get_running_loop().sock_sendall(sock, arguments)

    async def _receive(self) -> tuple[bytes, SharedBytes | None]:
        sock, loop = self._socket, asyncio.get_running_loop()
        assert sock is not None, "it is started"
        readable = asyncio.Event()
        loop.add_reader(sock, readable.set)
        try:
            head, fds = b"", list[int]()
            while not head:
                await readable.wait()
                readable.clear()
                with contextlib.suppress(BlockingIOError):
                    head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, 1)
                    if not head:
                        raise EOFError
        finally:
            loop.remove_reader(sock)
        (left,) = _LENGTH.unpack(head)
        parts = list[bytes]()
        while left:
            data = await loop.sock_recv(sock, min(left, STEP_BYTES))
            if not data:
                raise EOFError
            left -= len(data)
            parts.append(data)
        return b"".join(parts), SharedBytes(fds[0]) if fds else None


def serve(fd: int, tasks: Mapping[str, Task]) -> None:
    """The helper's side: until the other side closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the proxy drains first
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    with contextlib.suppress(OSError):
        while (asked := _next(sock)) is not None:
            name, arguments, shared = asked
            result, new = tasks[name](arguments, _NOTHING if shared is None else shared.view())
            out = None if new is None else SharedBytes.of([new])
            del shared, new, asked
            socket.send_fds(sock, [_LENGTH.pack(len(result))], [] if out is None else [out.fd])
            sock.sendall(result)
            del out


def _next(sock: socket.socket) -> tuple[str, bytes, SharedBytes | None] | None:
    head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size + _NAME_BYTES, 1)
    if not head:
        return None
    (left,) = _LENGTH.unpack(head[: _LENGTH.size])
    arguments = bytearray()
    while left > len(arguments):
        data = sock.recv(left - len(arguments))
        if not data:
            return None
        arguments += data
    return head[_LENGTH.size :].decode().strip(), bytes(arguments), SharedBytes(fds[0]) if fds else None
