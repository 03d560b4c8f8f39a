"""Stored responses of /v1/responses: continued, read, and cancelled while they run in the background.

As in vLLM with VLLM_ENABLE_RESPONSES_API_STORE=1, they are in the memory of the one server that made them. A server
without a store knows none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import BadRequest, UnknownName
from .requests import JsonBody

Json = dict[str, Any]


@dataclass(slots=True)
class _Stored:
    response: Json
    items: list[Any] = field(default_factory=list)  # all input of the conversation so far, and the answers to it
    task: asyncio.Task[None] | None = None  # while it runs in the background


class ResponseStore:
    """is_on: whether responses are kept."""

    def __init__(self, *, is_on: bool = False) -> None:
        self._is_on = is_on
        self._stored: dict[str, _Stored] = {}

    def history(self, body: JsonBody) -> list[Any]:
        """The items before the request's own input; UnknownName for a previous response that is not here."""
        previous = body.text("previous_response_id")
        if not previous:
            return []
        if previous not in self._stored:
            raise UnknownName(f"Response with id '{previous}' not found.", "previous_response_id")
        return self._stored[previous].items

    def runs_in_background(self, body: JsonBody) -> bool:
        if not body.flag("background"):
            return False
        if body.raw("store") is False:
            raise BadRequest("background can only be used when `store` is true", "background")
        if not self._is_on:
            raise BadRequest("This vLLM engine does not support `store=True`.", "background")
        return True

    def run(self, response: Json, work: Coroutine[Any, Any, None]) -> None:
        """Keeps a queued response, whose answer is on its way."""
        self._stored[response["id"]] = _Stored(response, task=asyncio.create_task(work))

    def keep(self, body: JsonBody, response: Json) -> None:
        if self._is_on and body.raw("store") is not False:
            items = [*self.history(body), *input_items(body), *response["output"]]
            self._stored[response["id"]] = _Stored(response, items)

    def read(self, response_id: str) -> Json:
        return self._found(response_id).response

    def cancel(self, response_id: str) -> Json:
        stored = self._found(response_id)
        if stored.response["status"] not in ("queued", "in_progress"):
            raise BadRequest("Cannot cancel a synchronous response.", "response_id")
        stored.response = stored.response | {"status": "cancelled"}
        if stored.task is not None:
            stored.task.cancel()
        return stored.response

    def _found(self, response_id: str) -> _Stored:
        if response_id not in self._stored:
            raise UnknownName(f"Response with id '{response_id}' not found.", "response_id")
        return self._stored[response_id]


def input_items(body: JsonBody) -> list[Any]:
    given = body.raw("input")
    return [{"role": "user", "content": given}] if isinstance(given, str) else given if isinstance(given, list) else []
