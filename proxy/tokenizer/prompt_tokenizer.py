"""A turn's prompt in tokens, if a process beside the proxy knows them soon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from ..bodies.helper_process import HelperProcess
from ..bodies.shared_bytes import SharedBytes
from ..errors import ConfigError, PPDError
from ..kv_events.block_tokens import PromptTokens
from ..openai.request import Endpoint, Request
from ..telemetry.metrics import Metrics
from .folder_names import FolderNames
from .token_worker import Ask, Tokenized

WAITING = 8  # prompts under way at once; more would be late
PROMPT_BYTES = 1024 * 1024  # larger prompts are not known in time, even if most of them was tokenised before
LIMIT_S = 15.0  # of one prompt, whoever waits: longer than a new process reads its tokenizer; then a template loops
LOAD_S = 120.0  # of a tokenizer's files, at the start

_MODULE = "ppd.proxy.tokenizer.token_worker"
_CHANGE = "chat_template chat_template_kwargs mm_processor_kwargs media_io_kwargs prompt_embeds"
_CHAT = "messages tools functions function_call reasoning_effort documents truncate_prompt_tokens"
_ENDS = "add_generation_prompt continue_final_message add_special_tokens"
_RAW = "prompt suffix add_special_tokens truncate_prompt_tokens prompt_embeds"
_ITEMS = "input instructions tools reasoning truncation previous_response_id prompt conversation"
_BLOCKS = "system messages tools thinking output_config"
_MEMBERS = {
    Endpoint.CHAT: frozenset(f"{_CHAT} {_ENDS} {_CHANGE}".split()),
    Endpoint.COMPLETIONS: frozenset(_RAW.split()),
    Endpoint.RESPONSES: frozenset(f"{_ITEMS} {_CHANGE}".split()),
    Endpoint.MESSAGES: frozenset(f"{_BLOCKS} {_CHANGE}".split()),
}
_TOKENIZED = msgspec.msgpack.Decoder(Tokenized)


class TokenHelper(Protocol):
    """See `HelperProcess`."""

    @property
    def asked(self) -> int: ...

    async def ask(
        self, name: str, arguments: bytes, shared: SharedBytes | None = None, limit_s: float | None = None
    ) -> tuple[bytes, SharedBytes | None]: ...

    async def close(self) -> None: ...


class PromptTokenizer:
    def __init__(
        self,
        folders: FolderNames,
        metrics: Metrics,
        wait_s: float,
        aliases: Callable[[], Mapping[str, str]] = dict,
        helper: TokenHelper | None = None,
    ) -> None:
        """wait_s: of one turn. aliases: the one name that stands for each other name of a model."""
        self._folders = folders
        self._wait_s = wait_s
        self._metrics = metrics
        self._aliases = aliases
        self._helper = helper or HelperProcess(_MODULE, "the tokenizer", LIMIT_S)

    async def open(self) -> None:
        """ConfigError where a folder can't be used; called before anything is served."""
        for folder in self._folders.all():
            try:
                error = (await self._ask(Ask(folder), LOAD_S)).error
            except PPDError as exc:
                raise ConfigError(f"tokenizer: {folder} was not read in time", param="tokenizer") from exc
            if error:
                raise ConfigError(error, param="tokenizer")

    async def close(self) -> None:
        await self._helper.close()

    async def tokens(self, request: Request) -> PromptTokens | None:
        """None where it is not known in time, or can't be known."""
        folder = self._folders.of(request.model, self._aliases())
        if folder is None:
            return None
        found, result = await self._within(folder, request)
        self._metrics.tokenized.labels(result).inc()
        return found

    async def _within(self, folder: str, request: Request) -> tuple[PromptTokens | None, str]:
        names = _MEMBERS[request.endpoint]
        members = {name: raw for name, raw in request.fields.items() if name in names}
        if sum(memoryview(raw).nbytes for raw in members.values()) > PROMPT_BYTES:
            return None, "too_large"
        if self._helper.asked >= WAITING:
            return None, "busy"
        ask = Ask(folder, request.endpoint, msgspec.json.encode(members), request.cache_salt)
        try:
            async with asyncio.timeout(self._wait_s):
                found = await self._ask(ask)
        except TimeoutError:
            return None, "late"
        except PPDError:
            return None, "failed"
        if not found.ids:
            return None, found.why or "refused"
        return PromptTokens(found.ids, request.cache_salt), "known"

    async def _ask(self, ask: Ask, limit_s: float | None = None) -> Tokenized:
        answer, _ = await self._helper.ask("tokens", msgspec.msgpack.encode(ask), None, limit_s)
        return _TOKENIZED.decode(answer)
