"""One request over HTTP, from the first byte written to the end of its stream, and the connections it needs."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import aiohttp

from ppd.proxy.openai.sse import EventSplitter, event_data

from .answer import Answer, error_message
from .target import Target

OnEvent = Callable[[Answer, float], None]  # the answer as read up to an event, and when the event came

_KEEP_ALIVE_S = 2.0
"""Below the 5 s after which servers close an idle connection: a request sent at that moment would fail."""

_OTHER_FILES = 128  # that a Python process has open beside its connections


class LoadClient:
    """`now` is the run's clock."""

    def __init__(self, session: aiohttp.ClientSession, target: Target, now: Callable[[], float]) -> None:
        self._session = session
        self._target = target
        self._now = now

    async def ask(self, body: bytes, headers: Mapping[str, str], on_event: OnEvent | None = None) -> Answer:
        """Never raises, except when it is cancelled: a failure is in the answer."""
        answer = Answer(sent_s=self._now())
        context = SimpleNamespace(now=self._now, answer=answer)
        try:
            async with asyncio.timeout(self._target.timeout_s):
                async with self._session.post(
                    self._target.at(self._target.api.path),
                    data=body,
                    headers={**self._target.headers(), **headers},
                    allow_redirects=False,
                    trace_request_ctx=context,
                ) as response:
                    await self._read(response, answer, on_event)
        except TimeoutError:
            answer.error = answer.error or f"no whole answer within {self._target.timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as exc:
            if not answer.finished:
                answer.error = answer.error or f"the connection broke: {cause(exc)}"
        answer.ended_s = self._now()
        return answer

    async def _read(self, response: aiohttp.ClientResponse, answer: Answer, on_event: OnEvent | None) -> None:
        answer.status = response.status
        answer.route = response.headers.get("X-PPD-Route", "")
        answer.prefill = response.headers.get("X-PPD-Prefill", "")
        answer.decode = response.headers.get("X-PPD-Decode", "")
        if response.status != 200:
            said = error_message(await response.read())
            answer.error = f"status {response.status}" + (f": {said}" if said else "")
            return
        splitter = EventSplitter()

        def read(event: bytes, at_s: float) -> None:
            data = event_data(event)
            if data is not None:
                answer.read(data, at_s)
                if on_event is not None:
                    on_event(answer, at_s)

        async for chunk in response.content.iter_any():
            at_s = self._now()
            for event in splitter.feed(chunk):
                read(event, at_s)
        read(splitter.rest(), self._now())


def open_session(target: Target) -> aiohttp.ClientSession:
    """No limit on connections unless the target has one. It has no time-outs: callers set their own."""
    connector = aiohttp.TCPConnector(limit=target.connections or 0, keepalive_timeout=_KEEP_ALIVE_S)
    tracing = aiohttp.TraceConfig()
    tracing.on_request_chunk_sent.append(_note_sent)
    return aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None), trace_configs=[tracing]
    )


def allow_connections(wanted: int) -> str:
    """Raises the soft limit of open files as far as needed. Returns what is still missing, or an empty text."""
    needed = wanted + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ""
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed >= needed:
        return ""
    return f"{wanted} connections may be needed and {allowed - _OTHER_FILES} can be open (ulimit -Hn is {hard})"


def cause(exc: Exception) -> str:
    """Without the exception's own text, which may hold an address."""
    if isinstance(exc, TimeoutError) and not exc.errno:
        return "no answer in time"
    if isinstance(exc, aiohttp.ClientConnectorDNSError):
        return exc.os_error.strerror or "no such host"
    number = exc.errno if isinstance(exc, OSError) else None
    return os.strerror(number) if number else type(exc).__name__


async def _note_sent(
    _: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceRequestChunkSentParams
) -> None:
    # The body is written in one piece once there is a connection; until then the request waited in this client.
    asked = context.trace_request_ctx
    if asked is not None:
        asked.answer.sent_s = asked.now()
