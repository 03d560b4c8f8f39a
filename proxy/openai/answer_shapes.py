"""Typed JSON of workers' answers: only the members that the proxy reads, all of them optional.

OpenAI's and Anthropic's shapes as vLLM fills them. One struct serves an endpoint's chunks and its whole body where
their members do not collide.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .body_members import answer_as


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """`usage` with the member names of all endpoints: chat and completions, Responses, Messages."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class TokenCounts(msgspec.Struct, frozen=True):
    """The token counts of a `usage`, whichever endpoint it is from; None where it does not have the count."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


_NOTHING = TokenCounts()
MOST_TOKENS = 2**31 - 1
"""What an engine is believed: sessions keep a prompt and its answer together in 32 bits, and no context is as long."""


def usage_of(usage: Usage | None) -> TokenCounts:
    """In Messages `input_tokens` excludes what was read from or written to a cache: the prompt is the sum of the three.

    A count that is negative or too large becomes None, as it would corrupt sums and metrics.
    """
    if usage is None:
        return _NOTHING
    prompt, completion = usage.prompt_tokens, usage.completion_tokens
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = usage.cache_read_input_tokens if details is None else details.cached_tokens
    if prompt is None and usage.input_tokens is not None:
        prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    if completion is None:
        completion = usage.output_tokens
    if prompt is not None and not 0 <= prompt <= MOST_TOKENS:
        prompt = None
    if completion is not None and not 0 <= completion <= MOST_TOKENS:
        completion = None
    if cached is not None and not 0 <= cached <= MOST_TOKENS:
        cached = None
    return TokenCounts(prompt, completion, cached)


class UsageOnly(msgspec.Struct):
    usage: Usage | None = None


def body_usage(body: bytes) -> TokenCounts:
    answer = answer_as(body, UsageOnly)
    return _NOTHING if answer is None else usage_of(answer.usage)


class Error(msgspec.Struct):
    message: str | None = None
    type: str | None = None
    param: str | None = None
    code: int | str | None = None


class Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: Function | None = None


class AnswerMessage(msgspec.Struct):
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class AnswerChoice(msgspec.Struct):
    index: int = 0
    delta: AnswerMessage | None = None
    message: AnswerMessage | None = None
    text: str | None = None
    finish_reason: str | None = None


class AnswerChunk(msgspec.Struct):
    """A stream's chunk or a whole body of chat and completions."""

    object: str | None = None
    choices: list[AnswerChoice] | None = None
    usage: Usage | None = None
    error: Any = None


class Part(msgspec.Struct):
    type: str | None = None
    text: str | None = None


class Item(msgspec.Struct):
    type: str | None = None
    call_id: str | None = None
    id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None  # what the call of a custom tool has instead
    content: list[Part] | None = None


class Incomplete(msgspec.Struct):
    reason: str | None = None


class Response(msgspec.Struct):
    """A whole body of Responses, which its first and last events hold too."""

    id: str | None = None
    status: str | None = None
    output: list[Item] | None = None
    usage: Usage | None = None
    error: Error | None = None
    incomplete_details: Incomplete | None = None


class ResponsesEvent(msgspec.Struct):
    type: str | None = None
    delta: str | None = None
    output_index: int = 0
    item: Item | None = None
    response: Response | None = None
    message: str | None = None
    code: int | str | None = None
    error: Any = None


class ContentBlock(msgspec.Struct):
    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.Raw()  # verbatim: the text of the call's arguments


class BlockDelta(msgspec.Struct):
    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None


class AnthropicMessage(msgspec.Struct):
    id: str | None = None
    type: str | None = None
    content: list[ContentBlock] | None = None
    stop_reason: str | None = None
    usage: Usage | None = None
    error: Any = None


class MessagesEvent(msgspec.Struct):
    type: str | None = None
    index: int = 0
    message: AnthropicMessage | None = None
    content_block: ContentBlock | None = None
    delta: BlockDelta | None = None
    usage: Usage | None = None
    error: Any = None
