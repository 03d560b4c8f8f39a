"""Requests to workers: asked, awaited with a time-out on every step, and given up when their worker is gone.

Leaving `answer` early closes its connection, which is how vLLM is told to abort the request. A worker that is found
dead while legs wait for it is hung up on, so that nobody waits for a time-out.
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
from .answer import Answer
from .call import CONNECT, Call, Timeouts
from .pool import Place, Pool

POOLS_KEPT = 256
_WAYS_ASKED = 2  # over a kept connection, which the worker may just have closed, and over a new one
ONCE_CONNECTS_S = 5.0  # at most, for what must not arrive late: a handoff's lease runs meanwhile
_OURS = "Accept: */*\r\nAccept-Encoding: identity\r\nUser-Agent: ppd\r\n"  # bodies are read and relayed as they are
_OUR_LINES = 3 + _OURS.count("\n")


class Upstream:
    """All requests under way, and the connections kept for more."""

    def __init__(self, *, keepalive_s: float, tls: Tls | None = None) -> None:
        self._keepalive_s = keepalive_s
        self._tls = tls
        self._pools: dict[Place, Pool] = {}
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
        """The head of the worker's answer; LegError if there is none in time. The caller closes it.

        body: whole, or in parts that are sent as they are, one behind the other.
        """
        worker = call.worker
        pool = self._pool(worker)
        parts = (body,) if isinstance(body, bytes) else body
        head = _head(method, path, worker.address, headers or {}, sum(map(len, parts)))
        connect_s = min(timeouts.connect_s, ONCE_CONNECTS_S) if call.once else timeouts.connect_s
        try:
            for way in range(1, _WAYS_ASKED + 1):
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
                    # A kept connection that the worker closed as we wrote says nothing about the worker; but whether
                    # it has read the request all the same, nobody knows.
                    is_stale = exc.cause is Cause.RESET and kept is not None and not answer.status
                    if call.once or not is_stale or way == _WAYS_ASKED:
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
        """`ask`, closed at the end whatever happens."""
        answer = await self.ask(call, path, **ask)  # type: ignore[arg-type]
        try:
            yield answer
        finally:
            answer.close()

    async def warm(self, workers: Iterable[Worker], count: int, limit_s: float) -> None:
        """So many connections to each at hand, so that a turn after a pause does not wait for one."""
        await asyncio.gather(*(self._pool(worker).warm(count, limit_s) for worker in workers))

    def hang_up(self, worker: WorkerId) -> None:
        """Ends every request to a worker that is known to be gone."""
        for call in tuple(self._calls.get(worker, ())):
            call.give_up()

    def unheard(self, limit_s: float) -> list[WorkerId]:
        """Workers that were sent what must not arrive late, and have given no sign of life for so long since."""
        before_s = asyncio.get_running_loop().time() - limit_s
        return [
            worker
            for worker, calls in self._calls.items()
            if any(c.once and c.phase is Phase.SENT and not c.has_arrived and c.sent_s < before_s for c in calls)
        ]

    def heard(self, worker: WorkerId) -> None:
        """It has just answered something: what was sent to it before has arrived."""
        for call in self._calls.get(worker, ()):
            call.has_arrived = call.has_arrived or call.phase is Phase.SENT

    def forget(self, call: Call) -> None:
        calls = self._calls.get(call.worker_id)
        if calls is not None:
            calls.discard(call)
            if not calls:
                del self._calls[call.worker_id]

    def _pool(self, worker: Worker) -> Pool:
        place = (worker.address, worker.tls)
        return self._pools.get(place) or self._new_pool(place)

    def _new_pool(self, place: Place) -> Pool:
        if len(self._pools) > POOLS_KEPT:  # of workers that have come and gone
            self._pools = {place: pool for place, pool in self._pools.items() if pool.is_used}
        pool = self._pools[place] = Pool(place, keepalive_s=self._keepalive_s, tls=self._tls if place[1] else None)
        return pool


def _head(method: str, path: str, host: str, headers: Mapping[str, str], size: int) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {size}\r\n{_OURS}"
    for name, value in headers.items():
        head += f"{name}: {value}\r\n"
    # One that a value adds would be a header, or a request, of the client's choosing.
    if not head.count("\n") == head.count("\r") == len(headers) + _OUR_LINES:
        raise ValueError("a header holds a line end")
    return f"{head}\r\n".encode("latin-1", "replace")
