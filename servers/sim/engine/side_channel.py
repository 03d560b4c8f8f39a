"""The KV transfer from P to D: a small HTTP server on P, and D's client for it.

It replaces NIXL's ZeroMQ handshake and RDMA reads, and works between processes and hosts. Bodies are msgpack.
    POST /read    ReadBlocks -> BlockContents   the contents of P's blocks; 409 for another engine, model or block size,
                                                503 after a wedge
    POST /close   Notice                        these handoffs are read, or not needed: free them
    POST /extend  Notice                        a heartbeat: keep them
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp
import msgspec
from aiohttp import web

from ..core.block_pool import BlockPool
from ..core.counters import Counters, Trap
from ..core.handoffs import HandoffLedger, RemotePrefill


class ReadBlocks(msgspec.Struct, frozen=True):
    engine_id: str
    model: str
    block_size: int
    request_id: str
    block_ids: tuple[int, ...]


class BlockContents(msgspec.Struct, frozen=True):
    blocks: list[list[int]]


class Notice(msgspec.Struct, frozen=True):
    engine_id: str
    request_ids: tuple[str, ...]


class SideChannelError(Exception):
    """The other engine cannot be reached, is another one, or refused."""


_Message = TypeVar("_Message", ReadBlocks, Notice)


class SideChannel:
    """P's end. `wake` is called when blocks come free; `stalls` waits while a fault stops transfers (`SimEngine`)."""

    def __init__(
        self,
        *,
        engine_id: str,
        model: str,
        pool: BlockPool,
        handoffs: HandoffLedger,
        counters: Counters,
        wake: Callable[[], None],
        stalls: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._engine_id = engine_id
        self._model = model
        self._pool = pool
        self._handoffs = handoffs
        self._counters = counters
        self._wake = wake
        self._stalls = stalls

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/read", self._read)
        app.router.add_post("/close", self._notice(self._handoffs.close))
        app.router.add_post("/extend", self._notice(self._handoffs.extend))
        return app

    async def _read(self, request: web.Request) -> web.Response:
        message = await self._message(request, ReadBlocks)
        if (message.model, message.block_size) != (self._model, self._pool.block_size):
            raise web.HTTPConflict
        if await self._stalls(self._engine_id):
            raise web.HTTPServiceUnavailable
        try:
            contents = self._handoffs.read(message.request_id, message.block_ids)
        except IndexError as exc:
            raise web.HTTPBadRequest from exc
        self._wake()
        return web.Response(body=msgspec.msgpack.encode(BlockContents(contents)))

    def _notice(self, act: Callable[[str], None]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            for request_id in (await self._message(request, Notice)).request_ids:
                act(request_id)
            self._wake()
            return web.Response()

        return handle

    async def _message(self, request: web.Request, kind: type[_Message]) -> _Message:
        try:
            message = msgspec.msgpack.decode(await request.read(), type=kind)
        except msgspec.DecodeError as exc:
            raise web.HTTPBadRequest from exc
        if message.engine_id != self._engine_id:
            self._counters.traps[Trap.WRONG_ENGINE] += 1
            raise web.HTTPConflict
        return message


class Peers:
    """D's end: reads from and notifies any engine that a handoff names. Every method raises SideChannelError."""

    def __init__(self, session: aiohttp.ClientSession, *, model: str, block_size: int, timeout_s: float) -> None:
        self._session = session
        self._model = model
        self._block_size = block_size
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._read_timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s)

    async def read(self, remote: RemotePrefill, block_ids: tuple[int, ...]) -> list[list[int]]:
        """The tokens of each block, by block id. As on vLLM, a read that has begun has no time-out."""
        message = ReadBlocks(remote.engine_id, self._model, self._block_size, remote.request_id, block_ids)
        body = await self._post(remote, "/read", message, self._read_timeout)
        try:
            blocks = msgspec.msgpack.decode(body, type=BlockContents).blocks
        except msgspec.DecodeError as exc:
            raise SideChannelError("the peer's answer is not block contents") from exc
        if [len(block) for block in blocks] != [self._block_size] * len(block_ids):
            raise SideChannelError("the peer's answer has other blocks than were asked for")
        return blocks

    async def close(self, remote: RemotePrefill) -> None:
        await self._post(remote, "/close", Notice(remote.engine_id, (remote.request_id,)), self._timeout)

    async def extend(self, remote: RemotePrefill) -> None:
        await self._post(remote, "/extend", Notice(remote.engine_id, (remote.request_id,)), self._timeout)

    async def _post(
        self, remote: RemotePrefill, path: str, message: ReadBlocks | Notice, timeout: aiohttp.ClientTimeout
    ) -> bytes:
        url = f"http://{remote.host}:{remote.port}{path}"
        try:
            async with self._session.post(url, data=msgspec.msgpack.encode(message), timeout=timeout) as answer:
                if answer.status != 200:
                    raise SideChannelError(f"the peer answered {answer.status}")
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            raise SideChannelError("the peer cannot be reached") from exc
