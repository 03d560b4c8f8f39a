"""Reads a worker's answer, streamed or whole: token counts, finish reason, error, text and tool calls.

`AnswerObserver` sees every event's data and keeps an `AnswerSummary` up to date; the text and the tool calls of the
first choice go to an `AnswerSink`. The shapes are OpenAI's and Anthropic's as vLLM fills them. Data that cannot be
parsed is counted and never raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from ..errors import UNREADABLE, error_body
from ..readback.lineage import HandleReader, ToldHandle
from .answer_shapes import (
    AnswerChoice,
    AnswerChunk,
    AnthropicMessage,
    BlockDelta,
    ContentBlock,
    Error,
    Function,
    MessagesEvent,
    Response,
    ResponsesEvent,
    Usage,
    usage_of,
)
from .body_members import without_nan
from .request import CHOOSING, Endpoint

DONE = b"[DONE]"
ABORTED = "abort"
"""The finish reason of an engine that gave up. vLLM gives a message none then, where Anthropic's API always has one.
Its responses are cancelled or completed."""


class AnswerSink(Protocol):
    """Receives the text and the tool calls of the first choice, whole or in pieces."""

    def add_text(self, text: str) -> None: ...

    def add_tool_call(self, index: int, id: str | None, name: str | None, arguments: str) -> None:
        """One piece of the call at `index`. Indexes grow and may have gaps; `arguments` is a piece of a JSON text."""

    def add_reasoning(self) -> None: ...  # for each piece; its text is not passed on


class AnswerSummary(msgspec.Struct, gc=False):
    """What is known of an answer so far. Token counts are the worker's own, None until it sends them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None  # of the first choice; `ABORTED` where the engine gave up any
    response_id: str | None = None  # of responses and messages
    events: int = 0  # with data, parsable or not; comments and [DONE] are not counted
    undecodable: int = 0
    first_token_seen: bool = False  # text, reasoning, refusal or a tool call
    error: bytes | None = None  # the error that the worker sent, as {"error": {...}}
    ended: bool = False  # the stream's terminator, or a whole body, was received
    handle: ToldHandle | None = None  # of the KV that D keeps, where that is read

    @property
    def completed(self) -> bool:
        return self.ended and self.error is None


_CHUNK = msgspec.json.Decoder(AnswerChunk)
_BODY = msgspec.json.Decoder(Response)
_RESPONSES_EVENT = msgspec.json.Decoder(ResponsesEvent)
_MESSAGE_BODY = msgspec.json.Decoder(AnthropicMessage)
_MESSAGES_EVENT = msgspec.json.Decoder(MessagesEvent)

_CALLS = frozenset(("function_call", "custom_tool_call"))
_CALL_DELTAS = frozenset(("response.function_call_arguments.delta", "response.custom_tool_call_input.delta"))
_REASONING_DELTAS = frozenset(("response.reasoning_text.delta", "response.reasoning_summary_text.delta"))
_WRITTEN_DELTAS = frozenset(
    (
        "response.refusal.delta",
        "response.mcp_call_arguments.delta",
        "response.code_interpreter_call_code.delta",
    )
)
_LAST_EVENTS = frozenset(("response.completed", "response.incomplete", "response.failed"))


class AnswerObserver:
    """Reads one answer; `summary` is updated in place and never replaced."""

    __slots__ = ("_handle", "_shape", "_sink", "summary")

    def __init__(self, endpoint: Endpoint, sink: AnswerSink | None = None, *, reads_handle: bool = False) -> None:
        """reads_handle: of a chat or completion that was asked for its tokens' ids."""
        self.summary = AnswerSummary()
        self._handle = HandleReader() if reads_handle else None
        self._sink = sink
        self._shape = _SHAPES[endpoint]

    def observe(self, data: bytes) -> None:
        if data == DONE:
            self.summary.ended = self.summary.ended or self._shape.ends_with_done
            return
        self.summary.events += 1
        self._read(self._shape.event, data)
        if self._handle is not None:
            self._read_handle(self._handle, data)

    def observe_text(self, text: str, events: int = 1) -> None:
        """For events that are known to hold only this text, of the first choice (see `PlainEvents`)."""
        summary = self.summary
        summary.events += events
        if text:
            summary.first_token_seen = True
            if self._sink is not None:
                self._sink.add_text(text)

    def observe_tokens(self, text: str, ids: list[int]) -> None:
        """As `observe_text`, of an event with the ids of its tokens."""
        self.observe_text(text)
        if self._handle is not None:
            self._handle.add(ids)

    def adopt(self, summary: AnswerSummary) -> None:
        """Takes over what another observer has seen of the whole body; the sink is not fed."""
        for name in AnswerSummary.__struct_fields__:
            setattr(self.summary, name, getattr(summary, name))

    def observe_body(self, body: bytes) -> None:
        self.summary.events += 1
        self.summary.ended = self._read(self._shape.body, body)
        if self._handle is not None:
            self._read_handle(self._handle, body)

    def _read_handle(self, reader: HandleReader, data: bytes) -> None:
        reader.read(data)
        self.summary.handle = reader.told

    def _read(self, read: _Read, data: bytes) -> bool:
        try:
            read(self, data)
        except UNREADABLE:
            with_null = without_nan(data)
            if with_null is not None:
                return self._read(read, with_null)
            self.summary.undecodable += 1
            return False
        return True

    # Chat and completions

    def _chunk(self, data: bytes) -> None:
        chunk, summary = _CHUNK.decode(data), self.summary
        if chunk.error is not None:
            self._fail(data)
        elif chunk.object == "error":  # vLLM 0.9: the error's members at the top level
            self._fail(b'{"error":' + data + b"}")
        if chunk.usage is not None:
            self._count(chunk.usage)
        for choice in chunk.choices or ():
            if choice.index == 0:
                self._choice(choice, summary)
            elif choice.finish_reason == ABORTED:  # then not all of the answer is whole
                summary.finish_reason = ABORTED

    def _choice(self, choice: AnswerChoice, summary: AnswerSummary) -> None:
        if choice.finish_reason and summary.finish_reason != ABORTED:
            summary.finish_reason = choice.finish_reason
        if choice.text:
            self._text(choice.text)
        message = choice.delta or choice.message
        if message is None:
            return
        if message.content:
            self._text(message.content)
        if message.reasoning or message.reasoning_content:
            self._reasoning()
        if message.refusal:
            summary.first_token_seen = True
        if message.tool_calls:
            for position, call in enumerate(message.tool_calls):
                function = call.function or Function()
                index = position if call.index is None else call.index
                self._tool_call(index, call.id, function.name, function.arguments or "")

    # Responses

    def _responses_event(self, data: bytes) -> None:
        event = _RESPONSES_EVENT.decode(data)
        if event.type == "response.output_text.delta":
            self._text(event.delta)
        elif event.type in _CALL_DELTAS:
            self._tool_call(event.output_index, None, None, event.delta or "")
        elif event.type == "response.output_item.added":
            if event.item is not None and event.item.type in _CALLS:
                self._tool_call(event.output_index, event.item.call_id, event.item.name, "")
        elif event.type in _REASONING_DELTAS:
            self._reasoning()
        elif event.type in _WRITTEN_DELTAS:
            self.summary.first_token_seen = True
        elif event.type == "error":
            self._fail(error_body(event.message or "", "upstream_error", event.code))
        elif event.error is not None:
            self._fail(data)
        if event.response is not None:
            self._response(event.response)
            self.summary.ended = self.summary.ended or event.type in _LAST_EVENTS

    def _response_body(self, body: bytes) -> None:
        response = _BODY.decode(body)
        for index, item in enumerate(response.output or ()):
            if item.type in _CALLS:
                self._tool_call(index, item.call_id, item.name, item.arguments or item.input or "")
            elif item.type == "reasoning":
                self._reasoning()
            elif item.type == "message":
                for part in item.content or ():
                    self._text(part.text)
        self._response(response)

    def _response(self, response: Response) -> None:
        self.summary.response_id = response.id or self.summary.response_id
        if response.usage is not None:
            self._count(response.usage)
        incomplete = response.incomplete_details.reason if response.incomplete_details is not None else None
        if response.status == "cancelled":
            self.summary.finish_reason = ABORTED
        elif response.status not in (None, "queued", "in_progress"):
            self.summary.finish_reason = incomplete or response.status
        if response.error is not None or response.status == "failed":
            error = response.error or Error()
            self._fail(error_body(error.message or "", error.type or "upstream_error", error.code))

    # Messages

    def _messages_event(self, data: bytes) -> None:
        event = _MESSAGES_EVENT.decode(data)
        if event.error is not None:
            self._fail(data)
        if event.message is not None:
            self._message(event.message)
        if event.usage is not None:
            self._count(event.usage)
        if event.content_block is not None:
            self._block(event.index, event.content_block, "")  # the arguments follow as deltas; `input` is empty
        if event.delta is not None:
            self._block_delta(event.index, event.delta)
        if event.type == "message_stop":
            self.summary.ended = True
            self.summary.finish_reason = self.summary.finish_reason or ABORTED

    def _block_delta(self, index: int, delta: BlockDelta) -> None:
        self.summary.finish_reason = delta.stop_reason or self.summary.finish_reason
        self._text(delta.text)
        if delta.thinking:
            self._reasoning()
        if delta.partial_json is not None:
            self._tool_call(index, None, None, delta.partial_json)

    def _message_body(self, body: bytes) -> None:
        message = _MESSAGE_BODY.decode(body)
        if message.error is not None:
            self._fail(body)
        for index, block in enumerate(message.content or ()):
            self._block(index, block, bytes(block.input).decode())
        self._message(message)
        if message.error is None:
            self.summary.finish_reason = message.stop_reason or ABORTED

    def _message(self, message: AnthropicMessage) -> None:
        self.summary.response_id = message.id or self.summary.response_id
        self.summary.finish_reason = message.stop_reason or self.summary.finish_reason
        if message.usage is not None:
            self._count(message.usage)

    def _block(self, index: int, block: ContentBlock, arguments: str) -> None:
        if block.type == "tool_use":
            self._tool_call(index, block.id, block.name, arguments)
        elif block.thinking:
            self._reasoning()
        else:
            self._text(block.text)

    # All endpoints

    def _text(self, text: str | None) -> None:
        if text:
            self.summary.first_token_seen = True
            if self._sink is not None:
                self._sink.add_text(text)

    def _reasoning(self) -> None:
        self.summary.first_token_seen = True
        if self._sink is not None:
            self._sink.add_reasoning()

    def _tool_call(self, index: int, id: str | None, name: str | None, arguments: str) -> None:
        self.summary.first_token_seen = True
        if self._sink is not None:
            self._sink.add_tool_call(index, id, name, arguments)

    def _count(self, usage: Usage) -> None:
        # Each count by itself: Messages sends the prompt's first and the completion's last.
        summary, counts = self.summary, usage_of(usage)
        if (prompt := counts.prompt_tokens) is not None:
            summary.prompt_tokens = prompt
        if (completion := counts.completion_tokens) is not None:
            summary.completion_tokens = completion
        if (cached := counts.cached_tokens) is not None:
            summary.cached_tokens = cached

    def _fail(self, error: bytes) -> None:
        if self.summary.error is None:
            self.summary.error = error


_Read = Callable[[AnswerObserver, bytes], None]


class _Shape(NamedTuple):
    """How the answers of an endpoint are read."""

    event: _Read
    body: _Read  # a whole one
    ends_with_done: bool = False


# Bound methods would make a reference cycle of an observer: only the garbage collector would free it.
_CHUNKS = _Shape(AnswerObserver._chunk, AnswerObserver._chunk, ends_with_done=True)
_SHAPES = {
    **dict.fromkeys(CHOOSING, _CHUNKS),
    Endpoint.RESPONSES: _Shape(AnswerObserver._responses_event, AnswerObserver._response_body),
    Endpoint.MESSAGES: _Shape(AnswerObserver._messages_event, AnswerObserver._message_body),
}
