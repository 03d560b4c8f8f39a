"""One streamed completion, token by token, from an endpoint that speaks OpenAI's API. A failure is a record too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import msgspec

from .records import Stream

_WORDS_OF_AN_ERROR = 200  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    url: str  # without /v1
    model: str
    api_key: str = ""
    timeout_s: float = 600.0  # a whole answer


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_EVENT = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class _Progress:
    """What is known of an answer while it comes."""

    token_s: list[float] = field(default_factory=list)
    status: int = 0
    usage: _Usage | None = None

    def read(self, event: _Event, at_s: float) -> None:
        """An event may bring several tokens, or a token without text; the running usage, where sent, counts them."""
        if event.usage is not None:
            self.usage = event.usage
            count = event.usage.completion_tokens
        else:
            count = len(self.token_s) + any(choice.text for choice in event.choices)
        self.token_s += [at_s] * (count - len(self.token_s))


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that is ready to be sent, so that making it does not hold up the streams that are being timed."""

    body: bytes
    prompt_tokens: int
    output_tokens: int
    is_decode: bool = True
    number: int = 0


class _Refused(Exception):
    """The endpoint's own words."""


@dataclass(frozen=True, slots=True)
class Client:
    session: aiohttp.ClientSession
    target: Target

    def ask(self, prompt: list[int], output_tokens: int, *, is_decode: bool = True, number: int = 0) -> Ask:
        body = {
            "model": self.target.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        return Ask(msgspec.json.encode(body), len(prompt), output_tokens, is_decode, number)

    async def complete(self, ask: Ask, now: Callable[[], float], on_start: Callable[[], None] = lambda: None) -> Stream:
        """The stream's record. `now`: seconds since the trial began; `on_start`: called at the first token."""
        progress, sent_s, error = _Progress(), now(), ""
        try:
            await self._read(ask.body, progress, now, on_start)
        except TimeoutError:
            error = f"no whole answer in {self.target.timeout_s:g} s"
        except _Refused as exc:
            error = str(exc)
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            error = f"{type(exc).__name__}: {exc}"[:_WORDS_OF_AN_ERROR]
        if not error and len(progress.token_s) != ask.output_tokens:
            error = f"{len(progress.token_s)} of {ask.output_tokens} tokens"
        usage = progress.usage
        return Stream(
            is_decode=ask.is_decode,
            number=ask.number,
            prompt_tokens=usage.prompt_tokens if usage else ask.prompt_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else None,
            sent_s=sent_s,
            token_s=tuple(progress.token_s),
            status=progress.status,
            error=error,
        )

    async def _read(
        self, body: bytes, progress: _Progress, now: Callable[[], float], on_start: Callable[[], None]
    ) -> None:
        headers = {"Content-Type": "application/json"}
        if self.target.api_key:
            headers["Authorization"] = f"Bearer {self.target.api_key}"
        url = f"{self.target.url.rstrip('/')}/v1/completions"
        async with (
            asyncio.timeout(self.target.timeout_s),
            self.session.post(url, data=body, headers=headers) as answer,
        ):
            progress.status = answer.status
            if answer.status != 200:
                raise _Refused(f"HTTP {answer.status}: {(await answer.text())[:_WORDS_OF_AN_ERROR]}")
            async for line in answer.content:
                if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
                    continue
                event = _EVENT.decode(data)
                if bytes(event.error):
                    raise _Refused(bytes(event.error).decode(errors="replace")[:_WORDS_OF_AN_ERROR])
                has_started = bool(progress.token_s)
                progress.read(event, now())
                if progress.token_s and not has_started:
                    on_start()
