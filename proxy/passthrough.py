"""Requests outside of conversations: forwarded as they are to one worker that serves the model.

Any method, content type and body. The model is read from a JSON body or a multipart form field, only to choose the
worker; a request without one goes to the least loaded worker of the fleet.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import msgspec

from .config import ProxyConfig
from .errors import LegError, NoWorkerError, RequestError, WorkerUnreachable
from .registry import Registry
from .turns import MODEL_LIMIT
from .upstream import Answer, Timeouts, Upstream
from .views import WorkerView, check_model
from .workers import Role

ENDPOINTS = (
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/v1/score",
    "/score",
    "/classify",
    "/pooling",
)

# Names only: with dots or escapes in it, a path could become that of another endpoint on its way.
AUDIO = re.compile(r"/v1/audio(?:/[A-Za-z0-9_-]+)+")

_FORM_MODEL = re.compile(rb'name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,256})\r\n')
# Engines that do everything come first; a P is asked last, as its queue is the fleet's TTFT.
_PREFERENCE = {Role.REPLICA: 0, Role.DECODE: 1, Role.PREFILL: 2}


class _ModelOnly(msgspec.Struct):
    model: str = ""


def model_of(content_type: str, body: bytes) -> str:
    """The model that a body names, or "" where it names none; RequestError for a name that is none."""
    if content_type.startswith("multipart/form-data"):
        found = _FORM_MODEL.search(body)
        model = found.group(1).decode("utf-8", "replace") if found else ""
    else:
        try:
            model = msgspec.json.decode(body, type=_ModelOnly).model
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            model = ""
    if len(model) > MODEL_LIMIT:
        raise RequestError(f"model: must be a name of at most {MODEL_LIMIT} characters", param="model")
    return model


@dataclass(slots=True)
class Forwarded:
    """A worker's answer on its way: status and type are the worker's own."""

    status: int
    headers: dict[str, str]
    chunks: AsyncIterator[bytes]


class Passthrough:
    """Forwards requests, and merges the model lists of the fleet."""

    def __init__(self, config: ProxyConfig, registry: Registry, upstream: Upstream) -> None:
        self._registry = registry
        self._upstream = upstream
        self._timeouts = Timeouts(config.connect_timeout_s, config.answer_timeout_s, config.idle_timeout_s)
        self._attempts = config.attempts

    async def forward(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Forwarded:
        """A worker's answer; one that can't be reached is passed over, as nothing has been computed yet."""
        model = model_of(headers.get("content-type", ""), body)
        workers = self._candidates(model)
        if not workers:
            if model:
                check_model(model, self._registry.views())
            raise NoWorkerError(f"no worker can serve model {model!r} now")
        for view in workers[: self._attempts]:
            try:
                return await self._ask(view, method, path, body, headers)
            except WorkerUnreachable as exc:
                failure = exc
        raise failure

    async def models(self, headers: Mapping[str, str]) -> bytes:
        """`/v1/models` of the fleet: each served model once, as one of its workers describes it."""
        representatives = {view.worker.models: view for view in reversed(self._candidates(""))}
        answers = await asyncio.gather(*(self._cards(view, headers) for view in representatives.values()))
        cards: dict[str, msgspec.Raw] = {}
        for answer in answers:
            for card in answer:
                cards.setdefault(msgspec.json.decode(card, type=_Card).id, card)
        if not cards:
            raise NoWorkerError("no worker can be asked for its models now")
        return msgspec.json.encode({"object": "list", "data": list(cards.values())})

    async def _cards(self, view: WorkerView, headers: Mapping[str, str]) -> list[msgspec.Raw]:
        try:
            async with self._upstream.answer(
                view.worker.address, "/v1/models", method="GET", headers=headers, timeouts=self._timeouts
            ) as answer:
                return msgspec.json.decode(await answer.body(), type=_Cards).data
        except (LegError, msgspec.DecodeError):
            return []

    async def _ask(
        self, view: WorkerView, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> Forwarded:
        held: list[Answer] = []
        released = False

        def release(_: object = None) -> None:
            nonlocal released
            if not released:
                released = True
                self._registry.release(view.id)
                for answer in held:
                    answer.close()

        self._registry.reserve(view.id, 0)
        try:
            answer = await self._upstream.ask(
                view.worker.address, path, method=method, body=body or None, headers=headers, timeouts=self._timeouts
            )
        except BaseException:
            release()
            raise
        held.append(answer)
        task = asyncio.current_task()
        assert task is not None, "runs in the request's task"
        # The client may leave before the first chunk is asked for, when a generator's `finally` would never run.
        task.add_done_callback(release)
        kept = {"Content-Type": answer.content_type, "Content-Encoding": answer.content_encoding}
        return Forwarded(answer.status, {name: value for name, value in kept.items() if value}, _chunks(answer))

    def _candidates(self, model: str) -> list[WorkerView]:
        able = [view for view in self._registry.views() if view.takes_turns(model) or (not model and view.up)]
        return sorted(able, key=lambda view: (_PREFERENCE[view.role], view.requests, view.name))


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[msgspec.Raw]


async def _chunks(answer: Answer) -> AsyncIterator[bytes]:
    while data := await answer.chunk():
        yield data
