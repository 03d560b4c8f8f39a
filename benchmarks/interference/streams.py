"""One streamed completion as a record, with the time of each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ppd.offline.load.answer import LIMIT, Answer
from ppd.offline.load.client import LoadClient

from .records import Stream


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """Encoded before the trial begins, so that encoding does not delay the streams that are being timed."""

    body: bytes
    prompt_tokens: int
    output_tokens: int
    is_decode: bool = True
    number: int = 0


def request_for(
    model: str, prompt: list[int], output_tokens: int, *, is_decode: bool = True, number: int = 0
) -> StreamRequest:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    return StreamRequest(msgspec.json.encode(body), len(prompt), output_tokens, is_decode, number)


@dataclass(slots=True)
class _TokenTimes:
    on_start: Callable[[], None]  # called at the first token
    token_s: list[float] = field(default_factory=list)

    def read(self, answer: Answer, at_s: float) -> None:
        """An event may bring several tokens, or a token without text: the running usage counts them where it is sent.

        Without usage, each text counts as one token.
        """
        count = answer.output_tokens if answer.counted else len(answer.texts)
        has_started = bool(self.token_s)
        self.token_s += [at_s] * (count - len(self.token_s))
        if self.token_s and not has_started:
            self.on_start()


async def complete(client: LoadClient, request: StreamRequest, on_start: Callable[[], None] = lambda: None) -> Stream:
    times = _TokenTimes(on_start)
    answer = await client.ask(request.body, {}, times.read)
    error = answer.error[:LIMIT]
    if not error and len(times.token_s) != request.output_tokens:
        error = f"{len(times.token_s)} of {request.output_tokens} tokens"
    return Stream(
        is_decode=request.is_decode,
        number=request.number,
        prompt_tokens=answer.prompt_tokens if answer.counted else request.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        sent_s=answer.sent_s,
        token_s=tuple(times.token_s),
        status=answer.status,
        error=error,
    )
