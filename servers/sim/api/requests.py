"""Reads the generation requests of every API into a `Generation`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ..core.block_pool import Namespace
from ..core.config import SimConfig
from ..core.errors import BadRequest, UnknownName
from ..core.reasoning import Thoughts
from ..core.sequence import Generation, Sampling
from ..core.structured_text import AnswerForm
from ..core.tokens import VOCABULARY_SIZE, is_token

_MAX_CHOICES = 128
_MAX_SALT = 128
_NOT_IN_SALTS = "@/\\\0"  # they could steer cache backends


class JsonBody:
    """A JSON object from a client, read field by field; BadRequest names the field."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    @classmethod
    def decode(cls, raw: bytes) -> JsonBody:
        try:
            fields = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise BadRequest("The body is not valid JSON.") from exc
        if not isinstance(fields, dict):
            raise BadRequest("The body must be a JSON object.")
        return cls(fields)

    def with_members(self, **members: Any) -> JsonBody:
        return JsonBody(self._fields | members)

    @property
    def members(self) -> Mapping[str, Any]:
        return self._fields

    def raw(self, name: str) -> Any:
        return self._fields.get(name)

    def integer(self, name: str, *, least: int = 0) -> int | None:
        value = self._fields.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadRequest(f"{name} must be an integer of at least {least}.", name)
        return value

    def flag(self, name: str) -> bool:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise BadRequest(f"{name} must be true or false.", name)
        return bool(value)

    def text(self, name: str) -> str | None:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, str):
            raise BadRequest(f"{name} must be a string.", name)
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise BadRequest(f"{name} must be an object.", name)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._fields.get(name)
        items = [value] if isinstance(value, str) else value or []
        if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
            raise BadRequest(f"{name} must be a string or a list of non-empty strings.", name)
        return tuple(items)

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self._fields.get(name) or []
        if not isinstance(value, list) or not all(is_token(item) for item in value):
            raise BadRequest(f"{name} must be a list of token ids below {VOCABULARY_SIZE}.", name)
        return tuple(value)


def served_model(body: JsonBody, config: SimConfig) -> str:
    name = body.text("model") or config.model
    if name not in config.names:
        raise UnknownName(f"The model `{name}` does not exist.", "model")
    return name


def session_id(body: JsonBody, headers: Mapping[str, str]) -> str | None:
    """As vLLM 0.28 and later looks for it."""
    extra = (body.mapping("vllm_xargs") or {}).get("session_id")
    return body.text("session_id") or headers.get("X-Session-ID") or (extra if isinstance(extra, str) else None) or None


def read_generation(
    body: JsonBody,
    config: SimConfig,
    prompts: tuple[tuple[int, ...], ...],
    *,
    limits: tuple[str, ...],
    default_limit: int | None = None,
    stop: str = "stop",
) -> Generation:
    """`limits`: the names of fields that cap the answer; the first one that is set counts."""
    model = served_model(body, config)
    stream = body.flag("stream")
    options = JsonBody(body.mapping("stream_options") or {})
    if not stream and body.raw("stream_options") is not None:
        raise BadRequest("Stream options can only be defined when `stream=True`.", "stream_options")
    salt = body.text("cache_salt")
    if salt is not None and (not 1 <= len(salt) <= _MAX_SALT or any(char in salt for char in _NOT_IN_SALTS)):
        raise BadRequest(f"cache_salt must have 1 to {_MAX_SALT} characters and none of @, / and \\.", "cache_salt")
    choices = body.integer("n", least=1) or 1
    if choices > _MAX_CHOICES:
        raise BadRequest(f"n must be at most {_MAX_CHOICES}.", "n")
    asked = [value for name in limits if (value := body.integer(name, least=1)) is not None]
    return Generation(
        model=model,
        namespace=Namespace(config.model, model if model in config.loras else None, salt),
        prompts=prompts,
        choices=choices,
        sampling=_sampling(body, _limit(config, prompts, asked[0] if asked else None, default_limit), stop),
        stream=stream,
        include_reasoning=body.raw("include_reasoning") is None or body.flag("include_reasoning"),
        reasoning_field=config.reasoning_field if config.reasoning else None,
        include_usage=options.flag("include_usage"),
        continuous_usage=options.flag("continuous_usage_stats"),
        return_token_ids=body.flag("return_token_ids"),
    )


def formed(
    generation: Generation,
    form: AnswerForm | None,
    thoughts: Thoughts | None = None,
    *,
    logprobs: int | None = None,
) -> Generation:
    return replace(generation, sampling=replace(generation.sampling, form=form, thoughts=thoughts, logprobs=logprobs))


def _limit(config: SimConfig, prompts: tuple[tuple[int, ...], ...], asked: int | None, default: int | None) -> int:
    """Tokens that the answer may have; BadRequest if prompt and answer do not fit into the context."""
    longest = max(map(len, prompts))
    if not all(prompts):
        raise BadRequest("The decoder prompt cannot be empty.", "prompt")
    room = config.max_model_len - longest
    if room < 1 or (asked or 0) > room:
        raise BadRequest(
            f"This model's maximum context length is {config.max_model_len} tokens. However, you requested "
            f"{asked or 1} output tokens and your prompt contains {longest} input tokens, for a total of "
            f"{longest + (asked or 1)} tokens. Please reduce the length of the input prompt or the number of "
            f"requested output tokens.",
            "input_tokens" if room < 1 else "max_tokens",
        )
    return asked or min(default or room, room)


def _sampling(body: JsonBody, max_tokens: int, stop: str) -> Sampling:
    min_tokens = body.integer("min_tokens") or 0
    if min_tokens > max_tokens:
        raise BadRequest(f"min_tokens must be at most max_tokens={max_tokens}, got {min_tokens}.", "min_tokens")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=body.flag("ignore_eos"),
        stop=body.texts(stop),
        stop_token_ids=body.token_ids("stop_token_ids"),
        include_stop=body.flag("include_stop_str_in_output"),
        reads_cache=body.raw("prompt_logprobs") is None,  # else, as on vLLM, each of its tokens is needed
    )
