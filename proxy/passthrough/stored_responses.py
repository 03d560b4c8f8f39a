"""Stored responses of /v1/responses, read and cancelled on the worker that has them.

Such a response is in the memory of the one engine that made it. The sessions tell which that probably is; if it has
moved on, or nothing is known, the others are asked.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Collection, Mapping
from copy import copy
from typing import Self

from ..admission.keys import Client
from ..admission.rate_limits import with_limits
from ..admission.scoped_requests import no_such_response
from ..config import ProxyConfig
from ..errors import OVERLOAD, LegError, NotFound, refusal
from ..failures import Phase
from ..fleet.view import WorkerView
from ..fleet.worker import ANSWERING, WorkerId
from ..openai.answer import AnswerObserver
from ..openai.edits import Edits, Redaction, edited_body
from ..openai.request import Endpoint, scope_of
from ..openai.stream_relay import StreamRelay
from ..routing.router import search_limit
from ..routing.state import State
from ..sessions.session import response_key
from ..upstream.call import Answer, Call, Timeouts
from ..upstream.client import Upstream
from ..upstream.relayed_headers import RelayedHeaders
from .passthrough import Forwarded

_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_UNKNOWN = (404, 405, 501)  # also of engines that have no such path


class StoredResponses:
    _only: Collection[WorkerId] | None = None

    def __init__(self, config: ProxyConfig, state: State, upstream: Upstream) -> None:
        self._state = state
        self._upstream = upstream
        self._header_rules = RelayedHeaders(config.relay_headers)
        self._timeouts = Timeouts(config.connect_timeout_s, config.first_event_timeout_s, config.idle_timeout_s)

    def within(self, only: Collection[WorkerId] | None) -> Self:
        """The same, among these workers alone; None: among all."""
        found = copy(self)
        found._only = only
        return found

    async def forward(
        self, method: str, path: str, response_id: str, headers: Mapping[str, str], client: Client
    ) -> Forwarded:
        """The answer of the worker that has the response. NotFound if none has it, LegError if some did not answer."""
        if not _ID.fullmatch(response_id):
            raise no_such_response(response_id)
        holders = self._holders(response_id, client)
        if client.scope is not None and not client.scope.owns(response_id) and not holders:
            raise no_such_response(response_id)
        self._state.rate_limits.take(client, 0, self._state.now())
        candidates, limit = self._candidates(holders), search_limit(client, response_id)
        asked = limit if limit < len(candidates) else None
        failure: LegError | NotFound = no_such_response(response_id, asked=asked)
        for view in candidates[:limit]:
            try:
                answer = await self._upstream.ask(
                    Call(view.worker), path, method=method, headers=headers, timeouts=self._timeouts
                )
                if answer.status not in _UNKNOWN:
                    return await self._relayed(view, answer, client)
                answer.close()
            except LegError as exc:
                failure = exc
        raise failure

    def _holders(self, response_id: str, client: Client) -> list[WorkerId]:
        """The D of the sessions of this tenant that know the response."""
        hasher, models = self._state.hasher, self._state.registry.families()
        scopes = [scope_of(Endpoint.RESPONSES, hasher, client.tenant, model) for model in models]
        found = [self._state.sessions.holder(response_key(hasher, scope, response_id)) for scope in scopes]
        return [worker for worker in found if worker is not None]

    def _candidates(self, holders: list[WorkerId]) -> list[WorkerView]:
        # A P answers nobody. A draining worker still has what it stored.
        able = [view for view in self._state.registry.views() if view.up and view.role in ANSWERING]
        able = able if self._only is None else [view for view in able if view.id in self._only]
        able.sort(key=lambda view: (view.id not in holders, view.requests, view.name))
        return able

    async def _relayed(self, view: WorkerView, answer: Answer, client: Client) -> Forwarded:
        """Whole answers are read here; LegError for one about the worker itself, or that names it."""
        limits = self._state.rate_limits.headers(client, self._state.now())
        headers = answer.relayed(self._header_rules)
        headers = with_limits(headers, limits) if limits else headers
        headers["Content-Type"] = answer.content_type
        status, redaction = answer.status, Redaction(view.worker.address)
        if answer.is_event_stream and status == 200:
            task = asyncio.current_task()
            assert task is not None, "runs in the request's task"
            task.add_done_callback(lambda _: answer.close())
            relay = StreamRelay(Endpoint.RESPONSES, Edits(redaction=redaction), AnswerObserver(Endpoint.RESPONSES))
            return Forwarded(status, headers, _events(answer, relay), "", view.name)
        try:
            body = await answer.body()
        finally:
            answer.close()
        if status in OVERLOAD or status >= 500 or (status >= 400 and redaction.applies_to(body)):
            raise refusal(status, b"", worker=view.id, phase=Phase.HEADERS, retry_after_s=answer.retry_after_s)
        return Forwarded(status, headers, _whole(edited_body(body, Edits())), "", view.name)


async def _whole(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _events(answer: Answer, relay: StreamRelay) -> AsyncIterator[bytes]:
    while data := await answer.chunk():
        yield relay.feed(data)
    yield relay.finish()
