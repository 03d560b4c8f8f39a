"""A request that is no turn, before a picker: the proxy's own application answers it, and Envoy only passes that on.

So keys, limits, the queue, paths and what workers get to see are the proxy's, whatever Envoy sends to its picker. The
price is that an answer goes to Envoy whole, at its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import unquote

from ..errors import PPDError
from ..telemetry.access_log import RECORD, AccessRecord

log = logging.getLogger(__name__)

App = Callable[[Any, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]
"""An ASGI application: https://asgi.readthedocs.io."""

ANSWER_LIMIT_BYTES = 32 * 1024 * 1024
_OF_ENVOY = ("content-length", "transfer-encoding", "connection", "date")  # it writes its own


class OtherRequest:
    """Takes the request piece by piece, and says its answer once: status, headers, body."""

    def __init__(
        self,
        app: App,
        headers: Mapping[str, str],
        state: Mapping[str, object],
        answer: Callable[[int, dict[str, str], bytes], None],
        refuse: Callable[[PPDError], None],
    ) -> None:
        """headers: as Envoy tells them; state: of the ASGI scope. refuse: called in place of `answer`, for an error of
        ours."""
        self._app = app
        self._headers = headers
        self._state = state
        self._answer = answer
        self._refuse = refuse
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._is_left = False
        self._status = 0
        self._answer_headers: dict[str, str] = {}
        self._body = bytearray()
        self._task: asyncio.Task[None] | None = None

    def begin(self, record: AccessRecord | None) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(record))

    def take(self, piece: bytes) -> None:
        self._events.put_nowait({"type": "http.request", "body": piece, "more_body": True})

    def ends(self) -> None:
        """The request is whole."""
        self._events.put_nowait({"type": "http.request", "body": b"", "more_body": False})

    def leave(self) -> None:
        """No answer is wanted any more. A cancelled Quart would leave its own tasks behind, so it is told."""
        self._is_left = True
        self._tell_end()

    def _tell_end(self) -> None:
        """Also after its answer: Quart 0.23 returns when it hears this, and not before."""
        self._events.put_nowait({"type": "http.disconnect"})

    async def _run(self, record: AccessRecord | None) -> None:
        try:
            await self._app(self._scope(record), self._events.get, self._send)
        except PPDError as exc:
            self._refuse(exc)
        except Exception as exc:
            log.error("the application failed", exc_info=exc)
            self._refuse(PPDError("internal error"))
        else:
            if not self._is_left:
                self._answer(self._status, self._answer_headers, bytes(self._body))

    def _scope(self, record: AccessRecord | None) -> dict[str, Any]:
        raw_path, _, query = self._headers.get(":path", "").encode("latin-1").partition(b"?")
        fields = [(name, value) for name, value in self._headers.items() if not name.startswith(":")]
        if "host" not in self._headers:
            fields.append(("host", self._headers.get(":authority", "")))
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self._headers.get(":method", ""),
            "scheme": self._headers.get(":scheme", "http"),
            "path": decoded_path(self._headers),
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields],
            "client": None,
            "server": None,
            "state": {**self._state} if record is None else {**self._state, RECORD: record},
            "extensions": {},
        }

    async def _send(self, event: dict[str, Any]) -> None:
        if event["type"] == "http.response.start":
            self._status = event["status"]
            pairs = ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in event["headers"])
            self._answer_headers = {name: value for name, value in pairs if name not in _OF_ENVOY}
            return
        self._body += event.get("body", b"")
        if len(self._body) > ANSWER_LIMIT_BYTES:
            raise _too_long()
        if not event.get("more_body", False):
            self._tell_end()


def decoded_path(headers: Mapping[str, str]) -> str:
    """Without its query and escapes, behind one slash: as the proxy's routes see it."""
    return "/" + unquote(headers.get(":path", "").partition("?")[0]).lstrip("/")


def _too_long() -> PPDError:
    error = PPDError("the answer is too long to pass through a picker: Envoy must send this path to the proxy's port")
    error.status = 502
    return error
