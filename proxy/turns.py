"""A client's body as a turn: what routing must know of it, and nothing decoded that routing need not know.

Whatever a client sends, the result is a `Request` or one `RequestError` that names the member at fault. Members that
routing does not read are left for the worker to judge.

Ids that a client may give its conversation, the first that is there counts: headers `X-Session-ID`,
`X-Session-Affinity`, `X-Correlation-ID`; body members `conversation_id`, `session_id`, `prompt_cache_key`, and
`conversation` of Responses. `metadata` is not read: what clients put there (a user, an account) spans conversations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec
from msgspec.json import Decoder

from . import prompts
from .chain import Chain, Hasher
from .config import SessionKey
from .errors import RequestError
from .prompts import read

Fields = dict[str, msgspec.Raw]

MODEL_LIMIT = 256  # characters; a name is kept in receipts and repeated in errors


class Endpoint(Enum):
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One client request. Sizes are bytes of what the model reads, not of the body."""

    endpoint: Endpoint
    model: str
    stream: bool
    wants_usage: bool  # the client asked for the usage event, or gets usage in any case
    max_output_tokens: int | None  # the smallest cap that the client gave
    single_engine: str | None  # why one engine must do all of it: n, echo, many_prompts, ...
    choices: int
    prompt_bytes: int
    fields: Fields = field(repr=False)  # the body's members as they came, private ones included
    chain: Chain = field(repr=False)
    scope: int  # key of tenant, model and endpoint: ids mean something only inside it
    label: int | None  # key of the session that the client named, or of the opener
    explicit_id: str | None
    previous_response_id: str | None
    opener: str | None  # MD5 of the first user message, where sessions go by it

    @property
    def stores_responses(self) -> bool:
        """Whether a later request can name this one's answer instead of sending the history."""
        return self.endpoint is Endpoint.RESPONSES

    def response_key(self, response_id: str) -> int:
        """The chain key of a stored response: prompts that continue it start there."""
        return self.chain.hasher.key(b"R", f"{self.scope:x}", response_id)


_BODY: Decoder[Fields] = Decoder(Fields)
_STRING: Decoder[str | None] = Decoder(str | None)
_FLAG: Decoder[bool | None] = Decoder(bool | None)
_NUMBER: Decoder[int | float | None] = Decoder(int | float | None)
_ID: Decoder[str | int | None] = Decoder(str | int | None)


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Conversation(msgspec.Struct):
    id: str


_STREAM_OPTIONS: Decoder[_StreamOptions | None] = Decoder(_StreamOptions | None)
_CONVERSATION: Decoder[str | _Conversation | None] = Decoder(str | _Conversation | None)

_ID_HEADERS = ("x-session-id", "x-session-affinity", "x-correlation-id")
_ID_MEMBERS = ("conversation_id", "session_id", "prompt_cache_key")
_CAPS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_TEMPLATE = ("chat_template", "chat_template_kwargs", "documents", "mm_processor_kwargs", "media_io_kwargs")

# What is rendered before the messages, or changes how all of them are. `tool_choice` and `response_format` guide the
# sampling only; `add_generation_prompt` and `continue_final_message` touch the end of the prompt, not its start.
_RENDERED = {
    Endpoint.CHAT: ("tools", "functions", "reasoning_effort", "add_special_tokens", *_TEMPLATE),
    Endpoint.COMPLETIONS: ("suffix", "add_special_tokens"),
    Endpoint.RESPONSES: ("tools", "prompt", "reasoning", *_TEMPLATE),
    Endpoint.MESSAGES: ("tools", *_TEMPLATE),
}


def parse_request(
    endpoint: Endpoint,
    body: bytes,
    headers: Mapping[str, str],
    *,
    tenant: str,
    hasher: Hasher,
    session_key: SessionKey,
) -> Request:
    """The turn in a body; RequestError (400) if it is none. `headers`: names in lower case, or case ignored."""
    try:
        fields = _BODY.decode(body)
        return _request(endpoint, fields, headers, tenant, hasher, session_key)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise RequestError(f"the body is not a JSON object: {exc}") from exc
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None


def _request(
    endpoint: Endpoint,
    fields: Fields,
    headers: Mapping[str, str],
    tenant: str,
    hasher: Hasher,
    session_key: SessionKey,
) -> Request:
    model = _model(fields)
    scope = hasher.key(b"D", tenant, model, endpoint.name)
    previous = _string(fields, "previous_response_id") if endpoint is Endpoint.RESPONSES else None
    chain, prompt_count = _chain(endpoint, fields, hasher, scope, previous)
    choices = prompt_count * _count(fields, "n", endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS))
    opener = _opener(endpoint, fields) if session_key is SessionKey.FIRST_USER_MESSAGE else None
    explicit_id = _explicit_id(endpoint, fields, headers)
    named = opener or explicit_id
    return Request(
        endpoint=endpoint,
        model=model,
        stream=_flag(fields, "stream"),
        wants_usage=_wants_usage(endpoint, fields),
        max_output_tokens=min((cap for name in _CAPS if (cap := _integer(fields, name)) is not None), default=None),
        single_engine=_single_engine(endpoint, fields, choices, prompt_count),
        choices=choices,
        prompt_bytes=chain.size,
        fields=fields,
        chain=chain,
        scope=scope,
        label=hasher.key(b"I", f"{scope:x}", "opener" if opener else "id", named) if named else None,
        explicit_id=explicit_id,
        previous_response_id=previous,
        opener=opener,
    )


def _model(fields: Fields) -> str:
    model = _string(fields, "model")
    if not model:
        raise RequestError("model: is missing", param="model")
    if len(model) > MODEL_LIMIT:
        raise RequestError(f"model: must be a name of at most {MODEL_LIMIT} characters", param="model")
    return model


def _chain(endpoint: Endpoint, fields: Fields, hasher: Hasher, scope: int, previous: str | None) -> tuple[Chain, int]:
    """The prompt's chain, and how many prompts the request holds."""
    salt = _string(fields, "cache_salt") or ""
    seed, size = prompts.seed_of(hasher, scope, salt, fields, _RENDERED[endpoint])
    if endpoint is Endpoint.COMPLETIONS:
        if not _given(fields, "prompt") and _given(fields, "prompt_embeds"):
            return prompts.embeddings(hasher, seed, fields["prompt_embeds"]), 1
        return prompts.completions(hasher, seed, _required(fields, "prompt"))
    if endpoint is Endpoint.RESPONSES:
        seed, size = prompts.system_of(hasher, seed, size, fields.get("instructions"), "instructions")
        stored = None if previous is None else hasher.key(b"R", f"{scope:x}", previous)
        return prompts.responses(hasher, seed, size, _required(fields, "input"), stored), 1
    if endpoint is Endpoint.MESSAGES:
        seed, size = prompts.system_of(hasher, seed, size, fields.get("system"), "system")
    prefills = endpoint is Endpoint.MESSAGES or _flag(fields, "continue_final_message")
    return prompts.chat(hasher, seed, size, _required(fields, "messages"), prefills=prefills), 1


def _explicit_id(endpoint: Endpoint, fields: Fields, headers: Mapping[str, str]) -> str | None:
    for name in _ID_HEADERS:
        if given := headers.get(name):
            return given
    for name in _ID_MEMBERS:
        value = read(_ID, fields[name], name) if name in fields else None
        if value not in (None, ""):
            return str(value)
    if endpoint is not Endpoint.RESPONSES or "conversation" not in fields:
        return None
    conversation = read(_CONVERSATION, fields["conversation"], "conversation")
    return conversation.id if isinstance(conversation, _Conversation) else conversation or None


def _opener(endpoint: Endpoint, fields: Fields) -> str | None:
    """MD5, as the paper has it; nothing secret rests on it. A raw prompt grows with each turn and has no opener."""
    if endpoint is Endpoint.COMPLETIONS:
        return None
    name = "input" if endpoint is Endpoint.RESPONSES else "messages"
    text = prompts.first_user_text(fields[name], name)
    return None if text is None else hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _single_engine(endpoint: Endpoint, fields: Fields, choices: int, prompt_count: int) -> str | None:
    if endpoint is Endpoint.RESPONSES and _given(fields, "truncation") and _string(fields, "truncation") != "disabled":
        return "truncation"
    if endpoint not in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        return None
    reasons = {
        # -1 fits the prompt to what the output's cap leaves, and P's cap is 1: P and D would see two prompts.
        "truncation": bytes(fields.get("truncate_prompt_tokens", b"")) == b"-1",
        "many_prompts": prompt_count > 1,
        "n": choices > prompt_count,
        "best_of": _count(fields, "best_of", True) > 1,
        "beam_search": _flag(fields, "use_beam_search"),
        "prompt_logprobs": _given(fields, "prompt_logprobs"),
        "echo": _flag(fields, "echo"),
        "prompt_embeds": endpoint is Endpoint.COMPLETIONS and _given(fields, "prompt_embeds"),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _wants_usage(endpoint: Endpoint, fields: Fields) -> bool:
    if endpoint not in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        return True
    options = read(_STREAM_OPTIONS, fields["stream_options"], "stream_options") if "stream_options" in fields else None
    return options is not None and bool(options.include_usage)


# -- members of the body


def _given(fields: Fields, name: str) -> bool:
    return name in fields and bytes(fields[name]) != b"null"


def _required(fields: Fields, name: str) -> msgspec.Raw:
    if not _given(fields, name):
        raise RequestError(f"{name}: is missing", param=name)
    return fields[name]


def _string(fields: Fields, name: str) -> str | None:
    return read(_STRING, fields[name], name) if name in fields else None


def _flag(fields: Fields, name: str) -> bool:
    return bool(read(_FLAG, fields[name], name)) if name in fields else False


def _integer(fields: Fields, name: str) -> int | None:
    """A count; 10.0 is 10, as the workers' own parsers have it."""
    value = read(_NUMBER, fields[name], name) if name in fields else None
    if value is None:
        return None
    if value < 0 or value != int(value):
        raise RequestError(f"{name}: must be a whole number and not negative", param=name)
    return int(value)


def _count(fields: Fields, name: str, applies: bool) -> int:
    """A number of things, 1 where it is not given."""
    value = _integer(fields, name) if applies else None
    if value == 0:
        raise RequestError(f"{name}: must be at least 1", param=name)
    return 1 if value is None else value
