"""The endpoints that do not generate: small answers, each a deterministic function of the request.

Texts that share words have similar vectors, so a ranking by relevance makes sense.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

from ..core.config import SimConfig
from ..core.errors import BadRequest
from ..core.tokens import decode
from .completions import read_prompts
from .prompts import chat_prompt
from .requests import JsonBody, served_model

_DIMENSIONS = 16
_LABELS = ("LABEL_0", "LABEL_1")


def embeddings(body: JsonBody, config: SimConfig) -> dict[str, Any]:
    prompts = _inputs(body, config)
    data = [
        {"index": at, "object": "embedding", "embedding": _vector(decode(prompt))} for at, prompt in enumerate(prompts)
    ]
    return _answer(body, config, prompts, data=data)


def embed(body: JsonBody, config: SimConfig) -> dict[str, Any]:
    """Cohere's form of embeddings."""
    texts = body.texts("texts")
    if not texts:
        raise BadRequest("Exactly one of texts, images, or inputs must be provided, and it must be non-empty.", "texts")
    served_model(body, config)
    return {
        "id": "embd-" + _digest(repr(texts)).hex()[:16],
        "embeddings": {"float": [_vector(text) for text in texts]},
        "texts": list(texts),
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": sum(map(len, texts))}},
        "response_type": "embeddings_by_type",
    }


def pooling(body: JsonBody, config: SimConfig) -> dict[str, Any]:
    prompts = _inputs(body, config)
    data = [{"index": at, "object": "pooling", "data": _vector(decode(prompt))} for at, prompt in enumerate(prompts)]
    return _answer(body, config, prompts, data=data)


def classify(body: JsonBody, config: SimConfig) -> dict[str, Any]:
    prompts = _inputs(body, config)
    return _answer(body, config, prompts, data=[_class(at, decode(prompt)) for at, prompt in enumerate(prompts)])


def score(body: JsonBody, config: SimConfig) -> dict[str, Any]:
    """One text_1 with every text_2, or as many text_1 as text_2 in pairs."""
    left, right = body.texts("text_1"), body.texts("text_2")
    if not left or not right or (len(left) > 1 and len(left) != len(right)):
        raise BadRequest("text_1 must be one text, or as many as text_2.", "text_1")
    pairs = list(zip(left * len(right) if len(left) == 1 else left, right, strict=True))
    data = [{"index": at, "object": "score", "score": _similarity(*pair)} for at, pair in enumerate(pairs)]
    return _answer(body, config, tuple(tuple(map(ord, one + two)) for one, two in pairs), data=data)


def rerank(body: JsonBody, config: SimConfig) -> dict[str, Any]:
    query, documents = body.text("query"), body.texts("documents")
    if not query or not documents:
        raise BadRequest("query and documents must not be empty.", "documents")
    top = body.integer("top_n") or len(documents)
    results = [
        {"index": at, "document": {"text": text}, "relevance_score": _similarity(query, text)}
        for at, text in enumerate(documents)
    ]
    results.sort(key=lambda result: -float(str(result["relevance_score"])))
    tokens = sum(len(query) + len(text) for text in documents)
    return {
        "id": "rerank-" + _digest(query).hex()[:16],
        "model": served_model(body, config),
        "usage": {"total_tokens": tokens},
        "results": results[:top],
    }


def transcription(file_name: str, content: bytes) -> dict[str, Any]:
    """Repeats name, size and hash, so that a test can check that the upload is complete."""
    digest = hashlib.sha256(content).hexdigest()
    return {"text": f"{file_name} {len(content)} bytes sha256 {digest}", "usage": {"type": "duration", "seconds": 1}}


def _inputs(body: JsonBody, config: SimConfig) -> tuple[tuple[int, ...], ...]:
    """The prompts in `input`, or the conversation in `messages`; BadRequest if one exceeds the context."""
    prompts = (
        (chat_prompt(body, config),)
        if body.raw("messages") is not None
        else read_prompts(body.raw("input"), config.tokenizer)
    )
    if max(map(len, prompts)) > config.max_model_len:
        raise BadRequest(f"This model's maximum context length is {config.max_model_len} tokens.", "input")
    return prompts


def _answer(
    body: JsonBody, config: SimConfig, prompts: tuple[tuple[int, ...], ...], *, data: list[dict[str, Any]]
) -> dict[str, Any]:
    tokens = sum(map(len, prompts))
    return {
        "id": "pool-" + _digest(repr(prompts)).hex()[:16],
        "object": "list",
        "created": 0,
        "model": served_model(body, config),
        "data": data,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    }


def _class(at: int, text: str) -> dict[str, Any]:
    first = _digest(text)[0] / 255
    probs = [first, 1 - first]
    label = _LABELS[probs.index(max(probs))]
    return {"index": at, "label": label, "probs": probs, "num_classes": len(_LABELS)}


def _similarity(left: str, right: str) -> float:
    return (1 + sum(a * b for a, b in zip(_vector(left), _vector(right), strict=True))) / 2


def _vector(text: str) -> list[float]:
    words = [_digest(word) for word in text.lower().split() or [text]]
    sums = [sum(digest[at] - 127.5 for digest in words) for at in range(_DIMENSIONS)]
    length = math.sqrt(sum(value * value for value in sums))
    return [value / length for value in sums]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
