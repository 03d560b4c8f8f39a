"""HTTP requests to workers, with a time-out on every step.

Closing an answer before its end closes the connection, which tells vLLM to abort the request. When probes find a worker
dead, `hang_up` ends the requests that it has not begun to answer, so that they need not wait for their time-outs.

A worker may close a kept connection just as a request is written to it, or say on it what nobody asked. Such a request
is sent again, over a new connection, only where the worker cannot have worked on it: see `_is_stale`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

from .. import plane
from ..errors import LegError, Overloaded
from ..failures import Cause, Phase
from ..fleet.worker import Worker, WorkerId
from ..runtime.loop_watch import uptime_s
from ..runtime.tls import Tls
from .call import CONNECT, GONE, TOO_OLD, UNASKABLE, Answer, Call, Expiry, Timeouts
from .connection import WorkerConnection
from .pool import Origin, Pool

POOLS_KEPT = 256
# A worker that had closed a kept connection resets it one round trip after the write: this is a long one. An engine may
# have worked on what is reset later.
STALE_S = 0.1
CLOSING_S = 0.05  # a process that dies may close its connections before its port
EXAMINED_S = 0.5  # for a connection that only asks whether the port is open
ONCE_CONNECTS_S = 5.0  # limit for a `once` call: the lease of its handoff runs meanwhile
_OURS = "Accept-Encoding: identity\r\nUser-Agent: ppd\r\n"  # bodies are relayed unchanged
# Of clients that say nothing, and of the proxy's own requests, such as canaries. The second counts the proxies that a
# request has passed.
_UNSAID = {"accept": "*/*", "x-ppd-hops": "1"}
_OUR_LINES = 3 + _OURS.count("\n")


class Upstream:
    """All open requests, and the connections kept for more."""

    def __init__(
        self,
        *,
        keepalive_s: float,
        tls: Tls | None = None,
        key: str = "",
        may_resend: Callable[[], bool] = lambda: True,
        poller: plane.Poller | None = None,
    ) -> None:
        """key: sent to each trusted worker as `Authorization`; empty: the requests bring their own.

        may_resend: asked before a request is sent again; it may take that out of a budget.
        """
        self.uptime = uptime_s  # the clock of each call's `Expiry`
        self._keepalive_s = keepalive_s
        self._tls = tls
        self._authorization = {"authorization": f"Bearer {key}"} if key else {}
        self._may_resend = may_resend
        self._poller = poller
        self._pools: dict[Origin, Pool] = {}
        self._calls: defaultdict[WorkerId, set[Call]] = defaultdict(set)  # of which no byte has gone to a client
        self._forget = self.forget  # one bound method for all answers
        self._examining: dict[WorkerId, asyncio.Task[bool]] = {}

    async def close(self) -> None:
        looks = tuple(self._examining.values())
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    async def ask(
        self,
        call: Call,
        path: str,
        *,
        timeouts: Timeouts,
        body: bytes | tuple[bytes | memoryview, ...] = b"",
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
        meanwhile: Callable[[], None] | None = None,
    ) -> Answer:
        """The worker's answer, once its head has come; LegError if none comes in time. The caller closes the answer.

        body: whole, or in parts, which are sent one after the other without being joined.
        meanwhile: called once the request has been written: what the answer needs, and the request does not.
        """
        worker = call.worker
        pool = self._pool(worker)
        # An empty part would stay in the buffer of asyncio's own transport (Python 3.12), which then writes for ever.
        parts = ((body,) if body else ()) if isinstance(body, bytes) else body
        sent = {**(headers or {}), **self._authorization} if worker.is_trusted else headers or {}
        head = _head_of(call, method, path, sent, sum(map(len, parts)))
        connect_s = min(timeouts.connect_s, ONCE_CONNECTS_S) if call.once else timeouts.connect_s
        call.phase = CONNECT
        self._calls[call.worker_id].add(call)
        try:
            kept = None if call.is_gone else pool.take()
            if kept is None:
                connection = await pool.connect(call, connect_s)
                return await self._exchange(connection, call, timeouts, head, parts, meanwhile)
            try:
                return await self._exchange(kept, call, timeouts, head, parts, meanwhile)
            except LegError as exc:
                if not _is_stale(exc, call, kept):
                    raise
                stale = exc
            fresh = await self._fresh(pool, call, connect_s, stale, is_free=kept.spoke_early)
            return await self._exchange(fresh, call, timeouts, head, parts)  # `meanwhile` has been called
        except BaseException:
            self.forget(call)
            raise

    async def _fresh(
        self, pool: Pool, call: Call, connect_s: float, stale: LegError, *, is_free: bool
    ) -> WorkerConnection:
        """The connection to send a request over again; raises `stale` where it may not be, or the worker has gone.

        is_free: the budget need not pay, as the worker never had the request.
        """
        call.phase = CONNECT
        self._calls[call.worker_id].add(call)
        try:
            connection = await pool.connect(call, connect_s)
        except LegError as exc:
            raise (stale if exc.cause is Cause.REFUSED else exc) from None
        if not (is_free or self._may_resend()):
            pool.free(connection)
            raise stale
        return connection

    async def _exchange(
        self,
        connection: WorkerConnection,
        call: Call,
        timeouts: Timeouts,
        head: bytes,
        parts: tuple[bytes | memoryview, ...],
        meanwhile: Callable[[], None] | None = None,
    ) -> Answer:
        self._check_age(call, connection)
        call.sent(connection.loop.time())
        answer = Answer(connection, timeouts, call, self._forget)
        connection.send(answer, head, parts)
        try:
            if meanwhile is not None:
                meanwhile()
            if call.expiry is None:
                await answer.begun()
            else:
                await self._begun_in_time(answer, call, call.expiry, connection)
        except BaseException:
            answer.close()
            raise
        return answer

    def _check_age(self, call: Call, connection: WorkerConnection) -> None:
        if call.expiry is not None and self.uptime() >= call.expiry.send_by_s:
            self._pool(call.worker).free(connection)
            raise call.error(*TOO_OLD)

    async def _begun_in_time(self, answer: Answer, call: Call, expiry: Expiry, connection: WorkerConnection) -> None:
        """As `Answer.begun`; ends a call whose handoff came to its worker too late, or may still come too late."""
        await asyncio.sleep(0)  # uvloop writes at the end of its round, which another task may have held up
        left_s = expiry.heard_by_s - self.uptime()
        if left_s <= 0:
            call.phase = Phase.SENT  # whatever has come of an answer meanwhile
            raise call.error(*TOO_OLD)
        call.patience_s = left_s / 2

        def look() -> None:
            if call.phase is Phase.SENT and (connection.has_undelivered or not call.has_arrived):
                call.fail(TOO_OLD)
                connection.abort()  # an answer that lies there already is not taken either

        timer = connection.loop.call_later(left_s, look)
        try:
            await answer.begun()
        finally:
            timer.cancel()
        # This loop may have stood still until both the end of the time and an answer were there.
        if not call.has_arrived and self.uptime() >= expiry.heard_by_s:
            call.phase = Phase.SENT
            raise call.error(*TOO_OLD)

    async def examine(self, exc: LegError, worker: Worker) -> LegError:
        """The failure of a leg on this worker; `worker gone` for a reset where the worker now refuses connections."""
        if exc.cause is not Cause.RESET or exc.phase is Phase.STREAM or not await self.is_dead(worker):
            return exc
        message, cause = GONE
        return LegError(message, worker=exc.worker, phase=exc.phase, cause=cause)

    async def is_dead(self, worker: Worker) -> bool:
        """Whether it refuses connections. All who ask at once share one look."""
        look = self._examining.get(worker.id)
        if look is None:
            look = self._examining[worker.id] = asyncio.create_task(self._refuses(worker))
            look.add_done_callback(lambda _: self._examining.pop(worker.id, None))
        return await asyncio.shield(look)

    async def _refuses(self, worker: Worker) -> bool:
        pool = self._pool(worker)
        for pause_s in (0.0, CLOSING_S):
            await asyncio.sleep(pause_s)
            try:
                (await pool.connect(Call(worker), EXAMINED_S)).abort()
            except LegError as exc:
                return exc.cause is Cause.REFUSED
            except Overloaded:  # no file is left to look with
                return False
        return False

    @contextlib.asynccontextmanager
    async def answer(self, call: Call, path: str, **ask: object) -> AsyncIterator[Answer]:
        answer = await self.ask(call, path, **ask)  # type: ignore[arg-type]
        try:
            yield answer
        finally:
            answer.close()

    async def warm(self, workers: Iterable[Worker], count: int, limit_s: float) -> None:
        """Keeps `count` idle connections to each worker, so that a turn after a pause need not connect."""
        await asyncio.gather(*(self._pool(worker).warm(count, limit_s) for worker in workers))

    def waits_for(self, worker: WorkerId) -> bool:
        """Whether a client has had no byte yet of what the worker is asked."""
        return worker in self._calls

    def hang_up(self, worker: WorkerId, *, only_handoffs: bool = False) -> None:
        """Ends requests whose clients have had no byte, or of them `only_handoffs` that may arrive late."""
        for call in tuple(self._calls.get(worker, ())):
            if call.may_arrive_late or not only_handoffs:
                call.give_up()

    def count_answers(self) -> list[WorkerId]:
        """Workers that have sent some of an answer, other than a server's error, since this was last called."""
        return [WorkerId(address) for (address, _), pool in self._pools.items() if pool.count_answers()]

    def answers(self, worker: WorkerId) -> int:
        """Changes while the worker answers."""
        return sum(self._pools[origin].answers for origin in ((worker, False), (worker, True)) if origin in self._pools)

    def unheard(self, limit_s: float) -> list[WorkerId]:
        """Workers that were sent a `once` call more than `limit_s` ago, and have answered nothing since.

        Sooner where the call's handoff is old already.
        """
        now_s = asyncio.get_running_loop().time()
        return [
            worker
            for worker, calls in self._calls.items()
            if any(c.may_arrive_late and c.sent_s + min(limit_s, c.patience_s) < now_s for c in calls)
        ]

    def heard(self, worker: WorkerId, asked_s: float) -> None:
        """The worker has answered what it was asked at `asked_s`, so it lives, and what was sent before has arrived."""
        for call in self._calls.get(worker, ()):
            call.has_arrived = call.has_arrived or (call.phase is Phase.SENT and call.sent_s <= asked_s)

    def forget(self, call: Call) -> None:
        calls = self._calls.get(call.worker_id)
        if calls is not None:
            calls.discard(call)
            if not calls:
                del self._calls[call.worker_id]

    def _pool(self, worker: Worker) -> Pool:
        origin = (worker.address, worker.tls)
        return self._pools.get(origin) or self._new_pool(origin)

    def _new_pool(self, origin: Origin) -> Pool:
        if len(self._pools) > POOLS_KEPT:  # some belong to workers that are gone
            kept = self._pools.items()
            self._pools = {origin: pool for origin, pool in kept if pool.is_used or origin[0] in self._calls}
        tls = self._tls if origin[1] else None
        pool = self._pools[origin] = Pool(origin, keepalive_s=self._keepalive_s, tls=tls, poller=self._poller)
        return pool


def _head_of(call: Call, method: str, path: str, headers: Mapping[str, str], size: int) -> bytes:
    try:
        return _head(method, path, call.worker.address, headers, size)
    except ValueError as exc:  # for the worker's coordinates, say
        raise call.error(*UNASKABLE) from exc


def _is_stale(exc: LegError, call: Call, kept: WorkerConnection) -> bool:
    """Whether the worker cannot have read the request on this kept connection; a `once` call is not sent again even so.

    It said something before it had all of the request. Or it had closed: a reset without a byte of an answer, at once.
    """
    if call.once or exc.cause is not Cause.RESET or exc.phase is not Phase.SENT or kept.has_heard:
        return False
    return kept.spoke_early or kept.loop.time() - call.sent_s <= STALE_S


def _head(method: str, path: str, host: str, headers: Mapping[str, str], size: int) -> bytes:
    # An answer to HEAD tells of a body that does not come. Whoever asked with HEAD leaves out the body of this one.
    method = "GET" if method == "HEAD" else method
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {size}\r\n{_OURS}"
    headers = {**_UNSAID, **headers}
    for name, value in headers.items():
        head += f"{name}: {value}\r\n"
    # A line end in a value would let the client add a header, or a whole request.
    if not head.count("\n") == head.count("\r") == len(headers) + _OUR_LINES:
        raise ValueError("a header holds a line end")
    return f"{head}\r\n".encode("latin-1", "replace")
