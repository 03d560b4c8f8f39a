"""Log probabilities, in the forms of chat completions and of completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..core.errors import BadRequest
from ..core.sequence import Ranking
from ..core.tokens import decode
from .requests import JsonBody

_MOST = 20  # vLLM's --max-logprobs


def chat_logprobs_asked(body: JsonBody) -> int | None:
    top = _count(body, "top_logprobs")
    if body.flag("logprobs"):
        return top or 0
    if top is not None:
        raise BadRequest("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    return None


def completion_logprobs_asked(body: JsonBody) -> int | None:
    return _count(body, "logprobs")


def chat_logprobs(rankings: Iterable[Ranking], top: int) -> dict[str, Any]:
    content = [
        _entry(*ranking[0]) | {"top_logprobs": [_entry(*ranked) for ranked in ranking[:top]]} for ranking in rankings
    ]
    return {"content": content}


def completion_logprobs(rankings: Sequence[Ranking], start: int = 0) -> dict[str, Any]:
    """start: characters of the answer before these tokens."""
    tokens = [_text(ranking[0][0]) for ranking in rankings]
    offsets = [start]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return {
        "text_offset": offsets[: len(tokens)],
        "token_logprobs": [ranking[0][1] for ranking in rankings],
        "tokens": tokens,
        "top_logprobs": [{_text(token): odds for token, odds in ranking} for ranking in rankings],
    }


def _count(body: JsonBody, name: str) -> int | None:
    count = body.integer(name)
    if count is not None and count > _MOST:
        raise BadRequest(f"Requested sample logprobs of {count}, which is greater than max allowed: {_MOST}", name)
    return count


def _entry(token: int, logprob: float) -> dict[str, Any]:
    text = _text(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}


def _text(token: int) -> str:
    return decode((token,))
