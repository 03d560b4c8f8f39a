"""HTTP requests to workers, with a time-out on every step.

Closing an answer before its end closes the connection, which tells vLLM to abort the request. When a worker is found
dead, `hang_up` ends all requests to it at once, so that they need not wait for their time-outs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping

from ..errors import LegError
from ..failures import Cause, Phase
from ..fleet.worker import Worker, WorkerId
from ..runtime.tls import Tls
from .call import CONNECT, Answer, Call, Timeouts
from .pool import Origin, Pool

POOLS_KEPT = 256
_TRIES = 2  # over a kept connection, which the worker may just have closed, then over a new one
ONCE_CONNECTS_S = 5.0  # limit for a `once` call: the lease of its handoff runs meanwhile
_HOPS = "x-ppd-hops"  # counts the proxies that a request has passed
_OURS = "Accept: */*\r\nAccept-Encoding: identity\r\nUser-Agent: ppd\r\n"  # bodies are relayed unchanged
_OUR_LINES = 3 + _OURS.count("\n")


class Upstream:
    """All open requests, and the connections kept for more."""

    def __init__(self, *, keepalive_s: float, tls: Tls | None = None) -> None:
        self._keepalive_s = keepalive_s
        self._tls = tls
        self._pools: dict[Origin, Pool] = {}
        self._calls: defaultdict[WorkerId, set[Call]] = defaultdict(set)

    async def close(self) -> None:
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
    ) -> Answer:
        """The worker's answer, once its head has come; LegError if none comes in time. The caller closes the answer.

        body: whole, or in parts, which are sent one after the other without being joined.
        """
        worker = call.worker
        pool = self._pool(worker)
        parts = (body,) if isinstance(body, bytes) else body
        head = _head(method, path, worker.address, headers or {}, sum(map(len, parts)))
        connect_s = min(timeouts.connect_s, ONCE_CONNECTS_S) if call.once else timeouts.connect_s
        try:
            for number in range(1, _TRIES + 1):
                call.phase = CONNECT
                self._calls[call.worker_id].add(call)
                kept = None if call.is_gone else pool.take()
                connection = kept or await pool.connect(call, connect_s)
                call.sent(connection.loop.time())
                answer = Answer(connection, timeouts, call, self.forget)
                connection.send(answer, head, parts)
                try:
                    while not answer.status:
                        await answer.news(timeouts.first_s)
                except LegError as exc:
                    answer.close()
                    # A worker may close a kept connection just as we write. That does not mean that the worker is
                    # bad, but it may have read the request: so a `once` call is not repeated.
                    is_stale = exc.cause is Cause.RESET and kept is not None and not answer.status
                    if call.once or not is_stale or number == _TRIES:
                        raise
                except BaseException:
                    answer.close()
                    raise
                else:
                    break
        except BaseException:
            self.forget(call)
            raise
        return answer

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

    def hang_up(self, worker: WorkerId) -> None:
        for call in tuple(self._calls.get(worker, ())):
            call.give_up()

    def unheard(self, limit_s: float) -> list[WorkerId]:
        """Workers that were sent a `once` call more than `limit_s` ago, and have answered nothing since."""
        before_s = asyncio.get_running_loop().time() - limit_s
        return [
            worker
            for worker, calls in self._calls.items()
            if any(c.once and c.phase is Phase.SENT and not c.has_arrived and c.sent_s < before_s for c in calls)
        ]

    def heard(self, worker: WorkerId) -> None:
        """The worker has just answered something, so what was sent to it before has arrived."""
        for call in self._calls.get(worker, ()):
            call.has_arrived = call.has_arrived or call.phase is Phase.SENT

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
            self._pools = {origin: pool for origin, pool in self._pools.items() if pool.is_used}
        pool = self._pools[origin] = Pool(origin, keepalive_s=self._keepalive_s, tls=self._tls if origin[1] else None)
        return pool


def _head(method: str, path: str, host: str, headers: Mapping[str, str], size: int) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {size}\r\n{_OURS}"
    if _HOPS not in headers:  # a request of the proxy's own: canaries
        headers = {**headers, _HOPS: "1"}
    for name, value in headers.items():
        head += f"{name}: {value}\r\n"
    # A line end in a value would let the client add a header, or a whole request.
    if not head.count("\n") == head.count("\r") == len(headers) + _OUR_LINES:
        raise ValueError("a header holds a line end")
    return f"{head}\r\n".encode("latin-1", "replace")
