"""One streamed answer: when its tokens came, its usage, its text, and its error.

Error texts go into records and onto the screen, so `short` cuts them, and removes keys and quoted prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from ..experiment.files import UNREADABLE

DONE = b"[DONE]"  # the data of the last event
LIMIT = 200  # characters of an error text
_WINDOW = 16  # so many characters of the prompt in a row are a quotation
_SHORTEST = 6  # fewer characters of a prompt can be in any sentence
_CUT = "[...]"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Failure(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: _Failure | str | None = None
    message: str | None = None  # of an error without an `error` member
    detail: object = None  # of errors of web frameworks such as FastAPI


_CHUNK = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class Answer:
    """Times in s since the run began. `error`: the server's own words, or what is wrong; empty if nothing is."""

    sent_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float = 0.0
    status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    counted: bool = False  # the usage has arrived
    finished: bool = False  # [DONE] has arrived
    route: str = ""
    prefill: str = ""
    decode: str = ""
    error: str = ""
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def read(self, data: bytes, at_s: float) -> None:
        if data == DONE:
            self.finished = True
            return
        try:
            chunk = _CHUNK.decode(data)
        except UNREADABLE as exc:
            self.error = self.error or f"an event cannot be read: {exc}"
            return
        if chunk.error is not None:
            self.error = self.error or (error_message(data) or "an error without a message")
        if chunk.usage is not None:
            self._count(chunk.usage)
        for choice in chunk.choices or ():
            self._take(choice, at_s)

    def judge(self, asked_tokens: int | None) -> None:
        """Sets `error` where an answer ended normally but is not complete."""
        if self.error:
            return
        if not self.finished:
            self.error = "the answer broke off"
        elif not self.counted:
            self.error = "the answer came without usage"
        elif self.first_token_s is None:
            self.error = "the answer has no token"
        elif asked_tokens is not None and self.output_tokens < asked_tokens:
            self.error = f"the answer has {self.output_tokens} of {asked_tokens} tokens"

    def _count(self, usage: _Usage) -> None:
        self.counted = True
        self.prompt_tokens, self.output_tokens = usage.prompt_tokens, usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _take(self, choice: _Choice, at_s: float) -> None:
        text, delta = choice.text or "", choice.delta
        thought = ""
        if delta is not None:
            text, thought = delta.content or "", delta.reasoning or delta.reasoning_content or ""
        if not (text or thought or choice.token_ids or choice.finish_reason):
            return  # the head of a message, before its first token
        if self.first_token_s is None:
            self.first_token_s = at_s
        self.last_token_s = at_s
        if text:
            self.texts.append(text)
        if choice.token_ids:
            self.token_ids += choice.token_ids


def error_message(body: bytes) -> str:
    """The message of an error body in any of the usual shapes; empty where it has none."""
    try:
        chunk = _CHUNK.decode(body)
    except UNREADABLE:
        return ""
    if isinstance(chunk.error, _Failure):
        return chunk.error.message
    return chunk.error or chunk.message or (chunk.detail if isinstance(chunk.detail, str) else "")


def short(message: str, *, secrets: Iterable[str], prompt: str) -> str:
    """`message` up to where it begins to quote `prompt`, at most LIMIT characters, with each secret replaced."""
    for secret in secrets:
        if secret:
            message = message.replace(secret, _CUT)
    line = " ".join(message[: 4 * LIMIT].split())
    quoted = _quotation(line, prompt)
    if quoted is not None:
        line = f"{line[:quoted]}{_CUT}"
    return line if len(line) <= LIMIT else f"{line[: LIMIT - 3]}..."


def _quotation(line: str, prompt: str) -> int | None:
    """Where `line` first has _WINDOW characters that the prompt has too; white space counts as one blank."""
    text = " ".join(prompt.split())
    window = min(_WINDOW, len(text))
    if window < _SHORTEST:
        return None
    return next((at for at in range(len(line) - window + 1) if line[at : at + window] in text), None)
