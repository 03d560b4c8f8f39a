"""Parses a client's body into a `Request`; only what routing needs is decoded.

Whatever a client sends, the result is a `Request` or one `RequestError` that names the member at fault. Members that
routing does not read are left for the worker to judge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.json import Decoder
from msgspec.structs import replace

from ..config import SessionKey
from ..errors import UNREADABLE, RequestError
from ..media.items import MediaItem
from ..sessions.hasher import Hasher
from ..sessions.prefix_chain import Chain
from ..sessions.prompt_head import Head
from ..sessions.session import Prompt, response_key
from ..sessions.session_name import session_name
from ..sessions.templates import NO_TEMPLATES, PLAIN, Template, Templates
from . import body_members
from .body_members import given, required
from .prompts.messages import read_items, read_messages
from .prompts.raw_prompts import embeddings, raw_prompt
from .prompts.reader import PromptReader
from .prompts.shapes import first_user_text, read
from .short_members import CAPS, Values, caps, count_of, priority_of, read_short
from .units import DEPTH_LIMIT, UNITS_LIMIT, check_depth, check_units

if TYPE_CHECKING:
    from .prompts.shapes import Message

Fields = body_members.Fields

MODEL_LIMIT = 256  # characters; the name is kept in receipts and repeated in errors


class Endpoint(StrEnum):
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


MESSAGES_MEMBER = {Endpoint.CHAT: "messages", Endpoint.RESPONSES: "input", Endpoint.MESSAGES: "messages"}
"""The member that holds messages or items, of the endpoints that have one."""

CHOOSING = (Endpoint.CHAT, Endpoint.COMPLETIONS)
"""The endpoints whose clients choose how many answers they get, and whether a stream shows usage."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One client request. Sizes are bytes of what the model reads, not of the body."""

    endpoint: Endpoint
    model: str
    stream: bool
    wants_usage: bool  # the client asked for the usage event, or gets usage in any case
    max_output_tokens: int | None  # the smallest cap that the client gave
    single_engine: str | None  # why one engine must do all of it: n, echo, ...
    choices: int
    counts_tell: bool = True  # what its answer counts of the prompt tells of its text and of the worker's cache
    prompt_bytes: int
    fields: Fields  # the body's members as they came, including those never forwarded
    prompt: Prompt
    cache_salt: str = ""  # as workers get it: a tenant's own is joined with the client's
    template: Template = PLAIN
    priority: int | None = None  # vLLM's member: lower is earlier
    prompts: tuple[msgspec.Raw, ...] | None = None  # of a list of prompts, where it has been split already
    has_media: bool = False
    media: tuple[MediaItem, ...] = ()  # in order, once they are named

    def __repr__(self) -> str:
        return f"Request({self.endpoint}, model={self.model!r}, prompt_bytes={self.prompt_bytes})"  # without the prompt

    def without_prompt(self) -> Request:
        """For when no worker will be asked again: a stream may stay open for long, and its body is large."""
        prompt = replace(self.prompt, chain=self.prompt.chain.without_prompt())
        return replace(self, fields=NO_FIELDS, prompt_bytes=0, prompt=prompt)


NO_FIELDS: Fields = {}
_TO_FIT = msgspec.Raw(b"-1")
_BODY: Decoder[Fields] = Decoder(Fields)
_STRING: Decoder[Any] = Decoder(str | None)
_FLAG: Decoder[Any] = Decoder(bool | None)
_NUMBER: Decoder[Any] = Decoder(int | float | None)


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Thinking(msgspec.Struct):
    type: str | None = None


class _OutputConfig(msgspec.Struct):
    effort: str | None = None


_STREAM_OPTIONS: Decoder[Any] = Decoder(_StreamOptions | None)
_THINKING: Decoder[_Thinking | None] = Decoder(_Thinking | None)
_OUTPUT_CONFIG: Decoder[_OutputConfig | None] = Decoder(_OutputConfig | None)
_NO_THINKING = msgspec.Raw(b'"disabled"')

NAMES = {Endpoint.RESPONSES: "conversation", Endpoint.MESSAGES: "metadata"}
_TEMPLATE = ("chat_template", "chat_template_kwargs", "documents", "mm_processor_kwargs", "media_io_kwargs")

# What else routing reads, with the decoders. A body has few of these members, so each is decoded when it is met.
_EVERYWHERE = {
    **dict.fromkeys(("model", "cache_salt"), _STRING),
    **dict.fromkeys((*CAPS, "priority"), _NUMBER),
    "stream": _FLAG,
}
_OPENAI = {
    **_EVERYWHERE,
    **dict.fromkeys(("n", "best_of"), _NUMBER),
    **dict.fromkeys(("use_beam_search", "echo", "continue_final_message"), _FLAG),
    "stream_options": _STREAM_OPTIONS,
}
_READ: dict[Endpoint, dict[str, Decoder[Any]]] = {
    Endpoint.CHAT: _OPENAI,
    Endpoint.COMPLETIONS: {name: kind for name, kind in _OPENAI.items() if name != "continue_final_message"},
    Endpoint.RESPONSES: {**_EVERYWHERE, **dict.fromkeys(("previous_response_id", "truncation"), _STRING)},
    Endpoint.MESSAGES: _EVERYWHERE,
}

# Members that are rendered before the messages, or change how all messages are rendered. `tool_choice` and
# `response_format` guide the sampling only; `add_generation_prompt` and `continue_final_message` touch the end of the
# prompt, not its start.
_RENDERED = {
    Endpoint.CHAT: ("tools", "functions", "reasoning_effort", "add_special_tokens", *_TEMPLATE),
    Endpoint.COMPLETIONS: ("suffix", "add_special_tokens"),
    Endpoint.RESPONSES: ("tools", "prompt", "reasoning", "previous_input_messages", *_TEMPLATE),
    Endpoint.MESSAGES: ("tools", *_TEMPLATE),
}
# What is decoded as a whole, item by item.
_READ_THROUGH = {
    Endpoint.CHAT: ("messages", *_RENDERED[Endpoint.CHAT]),
    Endpoint.COMPLETIONS: _RENDERED[Endpoint.COMPLETIONS],
    Endpoint.RESPONSES: ("instructions", "input", *_RENDERED[Endpoint.RESPONSES]),
    Endpoint.MESSAGES: ("system", "messages", *_RENDERED[Endpoint.MESSAGES]),
}
_EFFORT = ("output_config", "thinking")  # of `/v1/messages`: see `_effort`
RENDERED = frozenset((*(name for names in _RENDERED.values() for name in names), *_EFFORT))


def scope_of(endpoint: Endpoint, hasher: Hasher, tenant: str, model: str) -> int:
    """The key in which a tenant's conversations with a model begin."""
    return hasher.usual_key(b"D", tenant, model, endpoint)


def label_of(hasher: Hasher, scope: int, name: str | None, kind: str = "id") -> int | None:
    """The key of a conversation's name."""
    return hasher.key(b"I", f"{scope:x}", kind, name) if name else None


class ReadPrompt(msgspec.Struct, frozen=True):
    """What takes long to find out about a body."""

    chain: Chain
    count: int = 1  # of prompts
    opener: str | None = None
    has_media: bool = False


class ReadingRules(msgspec.Struct, frozen=True, kw_only=True):
    """How the body of one client is read."""

    hasher: Hasher
    tenant: str
    session_key: SessionKey = SessionKey.PREFIX
    depth_limit: int | None = DEPTH_LIMIT  # None: the body is known to be less deep
    units_limit: int | None = UNITS_LIMIT  # None: the body cannot have too many
    salted: Callable[[str], str] | None = None  # makes workers' salt of the client's own; None: that is workers' too
    aliases: Mapping[str, str] = {}  # the one name by which sessions know a model, for each other name of it
    templates: Templates = NO_TEMPLATES


def parse_request(endpoint: Endpoint, body: bytes, headers: Mapping[str, str], rules: ReadingRules) -> Request:
    """RequestError (400) for an invalid body. Names in `headers` are lower-case, or their case is ignored."""
    if rules.depth_limit is not None:
        check_depth(body, rules.depth_limit)
    if len(body) > body_members.SHORT_BYTES:
        # Whatever is wrong with a body is told by the way that decodes all of it first.
        with suppress(RequestError, *UNREADABLE):
            located = body_members.located(body, MESSAGES_MEMBER.get(endpoint))
            if located is not None:
                return _within_limits(endpoint, located, headers, rules)
    try:
        return _within_limits(endpoint, body_members.Members(_BODY.decode(body), body), headers, rules)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise RequestError(f"the body is not a JSON object: {exc}") from exc
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None


def _within_limits(endpoint: Endpoint, fields: Fields, headers: Mapping[str, str], rules: ReadingRules) -> Request:
    if rules.units_limit is not None:
        check_units([fields[name] for name in _READ_THROUGH[endpoint] if name in fields], rules.units_limit)
    return request_of(endpoint, fields, headers, rules)


def request_of(
    endpoint: Endpoint,
    fields: Fields,
    headers: Mapping[str, str],
    rules: ReadingRules,
    known: ReadPrompt | None = None,
) -> Request:
    """The request of a body's members. known: what another process has read of its prompt."""
    kinds = _READ[endpoint]
    values = {name: read_short(kinds[name], raw, name) for name, raw in fields.items() if name in kinds}
    model = _model(values)
    name = rules.aliases.get(model, model)
    scope, template = scope_of(endpoint, rules.hasher, rules.tenant, name), rules.templates.of(name, model)
    salt = values.get("cache_salt") or ""
    if rules.salted is not None:
        salt = rules.salted(salt)
    if known is None:
        reader = PromptReader(rules.hasher, template, scope)
        chain, count = _chain(endpoint, fields, values, reader, salt)
        is_named_by_opener = rules.session_key is SessionKey.FIRST_USER_MESSAGE
        known = ReadPrompt(
            chain, count, _opener(endpoint, fields) if is_named_by_opener else None, reader.content.has_media
        )
    chain, opener = known.chain, known.opener
    choices = known.count * count_of(values, "n")
    named = opener or session_name(headers, fields, read_short, NAMES.get(endpoint))
    return Request(
        endpoint=endpoint,
        model=model,
        stream=bool(values.get("stream")),
        wants_usage=_wants_usage(endpoint, values),
        max_output_tokens=min(caps(values), default=None),
        single_engine=_single_engine(endpoint, fields, values, choices > known.count),
        choices=choices,
        counts_tell=_HIDING.isdisjoint(fields) or _counts_tell(fields, values),
        prompt_bytes=chain.size,
        fields=fields,
        prompt=Prompt(
            chain=chain,
            model=name,
            label=label_of(rules.hasher, scope, named, "opener" if opener else "id"),
            opener=opener,
            previous_response_id=values.get("previous_response_id"),
            response_scope=scope if endpoint is Endpoint.RESPONSES else None,
        ),
        cache_salt=salt,
        template=template,
        priority=priority_of(values),
        has_media=known.has_media,
    )


def _model(values: Values) -> str:
    model: str | None = values.get("model")
    if not model:
        raise RequestError("model: is missing", param="model")
    if len(model) > MODEL_LIMIT:
        raise RequestError(f"model: must be a name of at most {MODEL_LIMIT} characters", param="model")
    return model


def _chain(endpoint: Endpoint, fields: Fields, values: Values, reader: PromptReader, salt: str) -> tuple[Chain, int]:
    """With how many prompts it is of."""
    head = reader.head(salt, rendered_of(endpoint, fields))
    if endpoint is Endpoint.COMPLETIONS:
        if not given(fields, "prompt") and given(fields, "prompt_embeds"):
            return embeddings(reader.hasher, head.seed, fields["prompt_embeds"]), 1
        return raw_prompt(reader.hasher, head.seed, required(fields, "prompt"))
    stored = None
    if endpoint is Endpoint.RESPONSES:
        previous = values.get("previous_response_id")
        stored = None if previous is None else response_key(reader.hasher, reader.scope, previous)
    read_list = read_items if endpoint is Endpoint.RESPONSES else read_messages
    messages = read_list(required(fields, MESSAGES_MEMBER[endpoint]), reader.hasher)
    continues = bool(values.get("continue_final_message"))
    return chain_of(endpoint, fields, reader, head, messages, continues=continues, stored=stored), 1


def chain_of(
    endpoint: Endpoint,
    fields: Fields,
    reader: PromptReader,
    head: Head,
    messages: list[Message],
    *,
    continues: bool = False,
    stored: int | None = None,
) -> Chain:
    """Of a prompt of messages or items. continues: the client says that the reply continues the last one. stored: as
    `PromptReader.responses` takes it."""
    if endpoint is Endpoint.RESPONSES:
        return reader.responses(head, messages, fields.get("instructions"), stored)
    if endpoint is Endpoint.MESSAGES:
        return reader.chat(head, messages, prefills=True, system=fields.get("system"))
    return reader.chat(head, messages, prefills=continues)


def rendered_of(endpoint: Endpoint, fields: Fields) -> Fields:
    """The members that are rendered before the messages, or change how all of them are."""
    if RENDERED.isdisjoint(fields):
        return NO_FIELDS
    found = {name: fields[name] for name in _RENDERED[endpoint] if name in fields}
    if endpoint is Endpoint.MESSAGES and (effort := _effort(fields)) is not None:
        found["reasoning_effort"] = effort
    return found


def _effort(fields: Fields) -> msgspec.Raw | None:
    """How much a model is to think, which some templates say before the messages: the one thing of these members that
    vLLM gives to the template (`AnthropicServingMessages`)."""
    thinking = read(_THINKING, fields["thinking"], "thinking") if "thinking" in fields else None
    if thinking is not None and thinking.type == "disabled":
        return _NO_THINKING
    config = read(_OUTPUT_CONFIG, fields["output_config"], "output_config") if "output_config" in fields else None
    return None if config is None or config.effort is None else msgspec.Raw(msgspec.json.encode(config.effort))


def _opener(endpoint: Endpoint, fields: Fields) -> str | None:
    name = MESSAGES_MEMBER.get(endpoint)
    if name is None:
        return None  # a raw prompt grows with each turn
    text = first_user_text(fields[name], name)
    # MD5, as in the paper; security does not depend on it.
    return None if text is None else hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


_WANT_ONE_ENGINE = {
    "n",
    "best_of",
    "use_beam_search",
    "echo",
    "prompt_logprobs",
    "prompt_embeds",
    "truncation",
    "truncate_prompt_tokens",
}
"""All members that `_single_engine` reads; most bodies have none of them."""


def _single_engine(endpoint: Endpoint, fields: Fields, values: Values, several_choices: bool) -> str | None:
    if _WANT_ONE_ENGINE.isdisjoint(fields):
        return None
    if endpoint is Endpoint.RESPONSES and _is_truncated(values):
        return "truncation"
    if endpoint not in CHOOSING:
        return None
    # -1 truncates the prompt to what max_tokens leaves of the context. P's max_tokens is 1, so P and D would compute
    # different prompts.
    if "truncate_prompt_tokens" in fields and fields["truncate_prompt_tokens"] == _TO_FIT:
        return "truncation"
    best_of = count_of(values, "best_of")
    if several_choices:
        return "n"
    if best_of > 1:
        return "best_of"
    if values.get("use_beam_search"):
        return "beam_search"
    if given(fields, "prompt_logprobs"):
        return "prompt_logprobs"
    if values.get("echo"):
        return "echo"
    return "prompt_embeds" if endpoint is Endpoint.COMPLETIONS and given(fields, "prompt_embeds") else None


_HIDING = {"prompt_logprobs", "echo", "truncate_prompt_tokens", "truncation", "previous_response_id"}
"""All members that `_counts_tell` reads."""


def _counts_tell(fields: Fields, values: Values) -> bool:
    """vLLM reads no cache for a prompt of whose tokens it is to say the logprobs, as all have to be computed for that
    (`skip_reading_prefix_cache`). What is cut off a prompt is not counted, and what is left begins as no other does. A
    stored response's history is rendered with this request's instructions, and not with those of its own.
    """
    is_cut = given(fields, "truncate_prompt_tokens") or _is_truncated(values)
    is_named = values.get("previous_response_id") is not None
    return not (is_cut or is_named or given(fields, "prompt_logprobs") or values.get("echo"))


def _is_truncated(values: Values) -> bool:
    """vLLM takes a null for "auto"."""
    return bool(values.get("truncation", "disabled") != "disabled")


def _wants_usage(endpoint: Endpoint, values: Values) -> bool:
    if endpoint not in CHOOSING:
        return True
    options: _StreamOptions | None = values.get("stream_options")
    return options is not None and bool(options.include_usage)
