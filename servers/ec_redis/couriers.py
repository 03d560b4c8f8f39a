"""Threads that send and receive, so that no engine step waits for the network."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from .transport import TransportDown
from .wire import Malformed

MOST_UNSENT = 4096
RETRY_S = 0.5
HANGS_S = 10.0  # at least, before a call of the transport counts as one that does not return
WARN_AGAIN_S = 30.0
log = logging.getLogger("vllm.ec_redis")


class Sending(NamedTuple):
    """What a thread shall do, unless it is later than `until_s`, and then in any case."""

    operation: Callable[[], None]
    after: Callable[[], None]
    until_s: float


@dataclass(slots=True)
class Caller:
    """A thread that calls the transport."""

    since_s: float = math.inf  # of the call that it is in; infinite: it is in none


class Contact:
    """Whether the transport answers, by its last operation, and what the log is told of it."""

    def __init__(self, now: Callable[[], float] = time.monotonic, *, hangs_s: float = HANGS_S) -> None:
        self._now = now
        self._hangs_s = hangs_s
        self._down_since_s: float | None = None
        self._lock = threading.Lock()
        self._warned_s = dict[str, float]()
        self._callers = defaultdict[str, list[Caller]](list)

    def caller(self, kind: str) -> Caller:
        """For one more thread of this kind."""
        self._callers[kind].append(Caller())
        return self._callers[kind][-1]

    def down_s(self) -> float:
        """For how long it has not answered; 0: it does."""
        since_s, hung_s = self._down_since_s, self._hung_s()
        return hung_s if since_s is None else max(hung_s, self._now() - since_s)

    def _hung_s(self) -> float:
        """For how long no thread of some kind has come back from its call. Calls that went well say nothing of it."""
        newest = ((max(caller.since_s for caller in callers), kind) for kind, callers in self._callers.items())
        since_s, kind = min(newest, default=(math.inf, ""))
        hung_s = self._now() - since_s
        if hung_s < self._hangs_s:
            return 0.0
        why = "the encoder cache's transport has not returned for %.0f s (%s), engines encode for themselves"
        self.warn(why, hung_s, kind)
        return hung_s

    def warn(self, message: str, *facts: object) -> None:
        """Once in a while for each message: what is wrong with one request is wrong with many."""
        now_s = self._now()
        if now_s >= self._warned_s.get(message, -math.inf) + WARN_AGAIN_S:
            self._warned_s[message] = now_s
            log.warning(message, *facts)

    def succeeded(self) -> None:
        if self._down_since_s is None:
            return
        with self._lock:
            self._down_since_s = None
        self.warn("the encoder cache's transport answers again")

    def failed(self, exc: Exception) -> None:
        """exc: of others than ours only the class is told, as its text may hold credentials."""
        with self._lock:
            if self._down_since_s is not None:
                return
            self._down_since_s = self._now()
        why = str(exc) if isinstance(exc, TransportDown) else type(exc).__name__
        self.warn("the encoder cache's transport does not answer, engines encode for themselves: %s", why)


class Couriers:
    """The threads of one engine; `close` ends them. What could not be sent within `stale_s` is dropped."""

    def __init__(
        self,
        contact: Contact,
        *,
        stale_s: float,
        now: Callable[[], float] = time.monotonic,
        retry_s: float = RETRY_S,
    ) -> None:
        """retry_s: until a receiver that has failed asks again."""
        self._contact = contact
        self._stale_s = stale_s
        self._retry_s = retry_s
        self._now = now
        self._closing = threading.Event()
        self._unsent: queue.Queue[Sending | None] = queue.Queue(MOST_UNSENT)
        self._threads = list[threading.Thread]()

    def send_with(self, threads: int) -> None:
        for _ in range(threads):
            self._start(self._send, "send")

    def receive_with(
        self, threads: int, fetch: Callable[[], bytes | None], take: Callable[[bytes], None], name: str
    ) -> None:
        for _ in range(threads):
            self._start(lambda caller: self._receive(caller, fetch, take), name)

    def send(self, operation: Callable[[], None], after: Callable[[], None] = lambda: None) -> None:
        """Has it done by a thread. after: is called whether it was sent or not."""
        try:
            self._unsent.put_nowait(Sending(operation, after, self._now() + self._stale_s))
        except queue.Full:
            after()

    def close(self, limit_s: float) -> None:
        """Waits for what is being sent or received, but not longer than `limit_s`."""
        self._closing.set()
        with suppress(queue.Full):  # then none of them sleeps
            for _ in self._threads:
                self._unsent.put_nowait(None)
        until_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _start(self, work: Callable[[Caller], None], name: str) -> None:
        caller = self._contact.caller(name)

        def until_closed() -> None:
            try:
                work(caller)
            except Exception:
                log.exception("a thread of the encoder cache has ended")

        thread = threading.Thread(target=until_closed, name=f"ec-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _send(self, caller: Caller) -> None:
        while not self._closing.is_set():
            one = self._unsent.get()
            if one is None:
                continue
            try:
                if self._now() <= one.until_s:
                    caller.since_s = self._now()
                    one.operation()
                    self._contact.succeeded()
            except Exception as exc:  # whatever a transport raises, the next message may get through
                self._contact.failed(exc)
            finally:
                caller.since_s = math.inf
                one.after()

    def _receive(self, caller: Caller, fetch: Callable[[], bytes | None], take: Callable[[bytes], None]) -> None:
        while not self._closing.is_set():
            caller.since_s = self._now()
            try:
                message = fetch()
                if not isinstance(message, bytes | None):
                    raise TransportDown(f"a message is a {type(message).__name__}, not bytes")
                self._contact.succeeded()
            except Exception as exc:
                self._contact.failed(exc)
                caller.since_s = math.inf
                self._closing.wait(self._retry_s)
                continue
            caller.since_s = math.inf
            if message is not None:
                try:
                    take(message)
                except Malformed as exc:
                    self._contact.warn("an unusable message of the encoder cache was dropped: %.200r", str(exc))
