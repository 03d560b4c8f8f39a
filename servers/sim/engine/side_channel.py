"""The KV transfer from P to D: a small HTTP server on P, and D's client for it.

It replaces ZeroMQ handshakes and RDMA, and works between processes and hosts. Bodies are msgpack. Where P pushes, D
pulls all the same. GETs are for what a protocol's own server on P tells, such as Mooncake's bootstrap server.
    POST /meet    Meet -> MetPrefill            waits for the prefill under a key; 410 if it will not come; never
                                                answered to a D that takes P for the process before
    POST /read    ReadBlocks -> BlockContents   the contents of P's blocks; 409 for another engine, model or block size,
                                                503 after a wedge
    POST /store   StoredPrompt                  a prompt's blocks, for this engine's cache or one leg; 409 as /read
    POST /find    FindBlocks -> BlockContents   what the cache holds of a prompt, once for each key; 410, 409 as above
    POST /close   Notice                        these handoffs are read, or not needed: free them
    POST /extend  Notice                        a heartbeat: keep them
    GET /embeddings/NAME                        on E: an item's embedding; 410 if it has been evicted
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Annotated, Protocol, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web

from ppd.proxy.config import host_and_port

from ..core.block_pool import BlockPool, Namespace
from ..core.config import SimConfig
from ..core.counters import Counters, Trap
from ..core.embeddings import EmbeddingStore, MediaInput
from ..core.fault_orders import FaultKind, Faults
from ..core.handoffs import HandoffLedger, KvSource, RemotePrefill
from ..encoding.media_parts import EmbeddingSource
from ..protocols.legs import KvProtocol, Own
from .arrivals import Arrivals, SentPrompt
from .meetings import MeetingFailed, Meetings, UsedKeys


class ReadBlocks(msgspec.Struct, frozen=True):
    engine_id: str
    model: str
    block_size: int
    request_id: str
    block_ids: tuple[int, ...]


class Meet(msgspec.Struct, frozen=True):
    engine_id: str  # empty: D was not told
    connector: str
    key: str
    process: str = ""  # P's, as D knows it by the engine's id; empty: not yet


class MetPrefill(msgspec.Struct, frozen=True):
    """What P has computed under a key."""

    engine_id: str
    process: str
    request_id: str
    block_ids: tuple[int, ...]
    tokens: int
    cached_tokens: int | None  # None: D is not told, and counts all that it is sent

    def remote(self, asked: RemotePrefill) -> RemotePrefill:
        return RemotePrefill(
            self.engine_id, self.request_id, asked.host, asked.port, self.block_ids, self.cached_tokens
        )


Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class BlockContents(msgspec.Struct, frozen=True):
    blocks: list[list[Token]]


class StoredPrompt(msgspec.Struct, frozen=True):
    """What P sends unasked."""

    engine_id: str  # empty: P was not told
    model: str
    namespace: Namespace
    blocks: list[list[int]]
    key: str = ""  # of the leg that it is for; empty: for the cache
    tokens: int = 0


class FindBlocks(msgspec.Struct, frozen=True):
    """What a peer wants of a prompt that this engine may hold."""

    engine_id: str  # empty: the peer was not told
    key: str
    model: str
    block_size: int
    hashes: list[int]  # of the prompt's full blocks, from its head


class Notice(msgspec.Struct, frozen=True):
    engine_id: str
    request_ids: tuple[str, ...]


class SideChannelError(Exception):
    """The other engine cannot be reached, is another one, or refused."""


_SAID_BYTES = 256  # of a refusal
_KNOWN_FOR_GOOD = "nixl_push"  # its D connects to P's process once, by the engine's id, and keeps to it

_Message = TypeVar("_Message", ReadBlocks, Meet, StoredPrompt, FindBlocks, Notice)


class ServingEngine(Protocol):
    """What the side channel needs of P."""

    config: SimConfig
    counters: Counters
    handoffs: HandoffLedger
    meetings: Meetings
    pool: BlockPool
    embeddings: EmbeddingStore
    arrivals: Arrivals
    protocol: KvProtocol

    @property
    def faults(self) -> Faults: ...

    @property
    def own(self) -> Own: ...

    @property
    def process(self) -> str: ...

    def kill(self) -> None: ...

    async def stalls(self, engine_id: str) -> bool: ...

    def wake(self) -> None: ...


class SideChannel:
    """P's end."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self._searches = UsedKeys(engine.counters)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/meet", self._meet)
        app.router.add_post("/read", self._read)
        app.router.add_post("/store", self._store)
        app.router.add_post("/find", self._find)
        app.router.add_post("/close", self._notice(self._close))
        app.router.add_post("/extend", self._notice(self._engine.handoffs.extend))
        app.router.add_get("/embeddings/{name}", self._embedding)
        app.router.add_get("/{page:.*}", self._page)
        return app

    async def _meet(self, request: web.Request) -> web.Response:
        engine, message = self._engine, await self._message(request, Meet)
        if message.connector != engine.config.connector:
            raise web.HTTPConflict
        if message.process not in ("", engine.process):
            await asyncio.Event().wait()  # D speaks to a process that is gone: nobody hears it
        try:
            handed_over = await engine.meetings.join(message.key)
        except MeetingFailed as exc:
            raise web.HTTPGone(text=str(exc)) from exc
        self._die_on_order()
        engine.handoffs.expire()
        if handed_over.request_id not in engine.handoffs:
            engine.counters.traps[Trap.EXPIRED_HANDOFF] += 1
            raise web.HTTPGone(text="the prefill has expired")
        met = MetPrefill(
            engine.own.engine_id,
            engine.process,
            handed_over.request_id,
            handed_over.block_ids,
            handed_over.tokens,
            None if engine.protocol.engine == "vllm" else handed_over.cached_tokens,
        )
        return web.Response(body=msgspec.msgpack.encode(met))

    async def _read(self, request: web.Request) -> web.Response:
        engine, message = self._engine, await self._message(request, ReadBlocks)
        if (message.model, message.block_size) != (engine.config.model, engine.pool.block_size):
            raise web.HTTPConflict
        if await engine.stalls(engine.own.engine_id):
            raise web.HTTPServiceUnavailable
        self._die_on_order()
        try:
            contents = engine.handoffs.read(message.request_id, message.block_ids)
        except IndexError as exc:
            raise web.HTTPBadRequest from exc
        engine.wake()
        return web.Response(body=msgspec.msgpack.encode(BlockContents(contents)))

    async def _store(self, request: web.Request) -> web.Response:
        engine, message = self._engine, await self._message(request, StoredPrompt)
        sizes = {len(block) for block in message.blocks}
        if message.model != engine.config.model or not sizes <= {engine.pool.block_size}:
            raise web.HTTPConflict
        if message.key:
            engine.arrivals.put(message.key, SentPrompt(message.tokens, message.blocks))
        else:
            engine.pool.store(message.blocks, message.namespace)
        return web.Response()

    async def _find(self, request: web.Request) -> web.Response:
        engine, message = self._engine, await self._message(request, FindBlocks)
        if (message.model, message.block_size) != (engine.config.model, engine.pool.block_size):
            raise web.HTTPConflict
        if not self._searches.use(message.key):
            raise web.HTTPGone(text=f"{message.key} was used before")
        if await engine.stalls(engine.own.engine_id):
            raise web.HTTPServiceUnavailable
        contents = [list(block.content) for block in engine.pool.match(message.hashes)]
        return web.Response(body=msgspec.msgpack.encode(BlockContents(contents)))

    async def _embedding(self, request: web.Request) -> web.Response:
        tokens = self._engine.embeddings.tokens(request.match_info["name"])
        if tokens is None:
            raise web.HTTPGone(text="the embedding has been evicted")
        return web.Response(body=msgspec.msgpack.encode(tokens))

    async def _page(self, request: web.Request) -> web.Response:
        page = self._engine.protocol.page(request.path, request.query, self._engine.own)
        if page is None:
            raise web.HTTPNotFound
        status, answer = page
        return web.Response(body=msgspec.json.encode(answer), status=status, content_type="application/json")

    def _die_on_order(self) -> None:
        if self._engine.faults.take_of_transfer(FaultKind.KILL_AT_TRANSFER):
            self._engine.kill()
            raise web.HTTPGone

    def _close(self, request_id: str) -> None:
        self._engine.handoffs.close(request_id)
        self._engine.meetings.take(request_id)

    def _notice(self, act: Callable[[str], None]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            for request_id in (await self._message(request, Notice)).request_ids:
                act(request_id)
            self._engine.wake()
            return web.Response()

        return handle

    async def _message(self, request: web.Request, kind: type[_Message]) -> _Message:
        try:
            message = msgspec.msgpack.decode(await request.read(), type=kind)
        except msgspec.DecodeError as exc:
            raise web.HTTPBadRequest from exc
        if message.engine_id not in ("", self._engine.own.engine_id):
            self._engine.counters.traps[Trap.WRONG_ENGINE] += 1
            raise web.HTTPConflict
        return message


class Peers:
    """D's end: reads from and notifies any engine that a handoff names. Every method raises SideChannelError."""

    def __init__(self, session: aiohttp.ClientSession, config: SimConfig) -> None:
        self._session = session
        self._connector = config.connector
        self._processes: dict[str, str] = {}  # P's that D knows, by the engine's id
        self._model = config.model
        self._block_size = config.block_size
        self._timeout = aiohttp.ClientTimeout(total=config.peer_timeout_s)
        self._patient = aiohttp.ClientTimeout(total=None, sock_connect=config.peer_timeout_s)

    async def meet(self, remote: RemotePrefill, key: str) -> MetPrefill:
        """Waits, without a time-out, for P to have computed the prompt under the key."""
        message = Meet(remote.engine_id, self._connector, key, self._processes.get(remote.engine_id, ""))
        body = await self._post(remote, "/meet", message, self._patient)
        try:
            met = msgspec.msgpack.decode(body, type=MetPrefill)
        except msgspec.DecodeError as exc:
            raise SideChannelError("the peer's answer is not a prefill") from exc
        if self._connector == _KNOWN_FOR_GOOD:
            self._processes.setdefault(met.engine_id, met.process)
        return met

    async def read(self, remote: RemotePrefill, block_ids: tuple[int, ...]) -> list[list[int]]:
        """The tokens of each block, by block id. As on vLLM, a read that has begun has no time-out."""
        message = ReadBlocks(remote.engine_id, self._model, self._block_size, remote.request_id, block_ids)
        blocks = _blocks(await self._post(remote, "/read", message, self._patient))
        if [len(block) for block in blocks] != [self._block_size] * len(block_ids):
            raise SideChannelError("the peer's answer has other blocks than were asked for")
        return blocks

    async def store(self, receiver: tuple[str, int], prompt: StoredPrompt) -> None:
        await self._post(RemotePrefill("", "", *receiver, None), "/store", prompt, self._timeout)

    async def find(self, source: KvSource, hashes: list[int]) -> list[list[int]]:
        """The contents of as many of these blocks as the peer holds, from the first on."""
        remote = RemotePrefill("", "", source.host, source.port, None)
        message = FindBlocks("", source.key, self._model, self._block_size, hashes)
        return _blocks(await self._post(remote, "/find", message, self._timeout))

    async def fetch(
        self, inputs: Iterable[MediaInput], given: Mapping[str, EmbeddingSource], store: EmbeddingStore
    ) -> None:
        """Embeddings from encoders, side by side. One that does not come is made here, or its request fails."""
        missing = [media for media in inputs if media.name in given and not store.holds(media)]
        found = await asyncio.gather(*(self._embedding(given[media.name], media.name) for media in missing))
        for media, tokens in zip(missing, found, strict=True):
            if tokens is not None:
                store.put(media.name, tokens)

    async def _embedding(self, source: EmbeddingSource, name: str) -> tuple[int, ...] | None:
        """None where the encoder has it no more, or does not answer."""
        url = f"http://{host_and_port(source.peer_host, source.peer_port)}/embeddings/{quote(name, safe='')}"
        try:
            async with self._session.get(url, timeout=self._timeout) as answer:
                body = await answer.read()
                return msgspec.msgpack.decode(body, type=tuple[int, ...]) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError, msgspec.DecodeError):
            return None

    async def close(self, remote: RemotePrefill) -> None:
        await self._post(remote, "/close", Notice(remote.engine_id, (remote.request_id,)), self._timeout)

    async def extend(self, remote: RemotePrefill) -> None:
        await self._post(remote, "/extend", Notice(remote.engine_id, (remote.request_id,)), self._timeout)

    async def _post(
        self,
        remote: RemotePrefill,
        path: str,
        message: Meet | ReadBlocks | StoredPrompt | FindBlocks | Notice,
        timeout: aiohttp.ClientTimeout,
    ) -> bytes:
        url = f"http://{host_and_port(remote.host, remote.port)}{path}"
        try:
            async with self._session.post(url, data=msgspec.msgpack.encode(message), timeout=timeout) as answer:
                if answer.status != 200:
                    said = (await answer.content.read(_SAID_BYTES)).decode("utf-8", "replace")
                    raise SideChannelError(f"the peer answered {answer.status}: {said}")
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
            raise SideChannelError("the peer cannot be reached") from exc


def _blocks(body: bytes) -> list[list[int]]:
    try:
        return msgspec.msgpack.decode(body, type=BlockContents).blocks
    except msgspec.DecodeError as exc:
        raise SideChannelError("the peer's answer is not block contents") from exc
