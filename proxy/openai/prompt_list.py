"""Makes one turn of each prompt in a list, and one answer of their answers. Pure: the caller runs the turns.

`/v1/completions` takes k prompts at once, and an engine answers them as one request with one handoff: the KV of the
other prompts would stay pinned on P. So each prompt becomes a request of its own with all other members of the body,
and the answers are merged as an engine would have written them:

* Choice j of prompt i has the index i * n + j, where n is the number of choices for each prompt.
* `id`, `created` and `model` are those of the first answer or event.
* `usage` is the sum, if every answer has one. Usage in each chunk of a stream stays as it came: vLLM counts one choice
  there, also in a list.
* `metrics` are removed: vLLM leaves them out for several prompts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import reduce
from typing import Any

import msgspec

from ..errors import UNREADABLE, BodyTooLarge, PPDError
from .answer import DONE
from .body_members import NULL, Part, decoded, encoded, given, marked_nan, members, unmarked_nan, value_of
from .request import Fields, Request
from .sse import EventSplitter, Fragment, event_data, with_data
from .stream_relay import BROKE_OFF

_LIST_OF_PROMPTS = re.compile(rb'\[\s*["\[]')  # not a list of token ids, which is one prompt
_FRAME = ("id", "created", "model")


@dataclass(frozen=True, slots=True)
class PromptList:
    """A request with several prompts."""

    prompts: list[msgspec.Raw]
    choices: int  # of each prompt
    others: Fields  # the body's members without the prompts

    def parts(self, at: int) -> tuple[Part, ...]:
        """Of the body with one prompt."""
        # Still a list: an engine accepts an empty text in a list only.
        before = msgspec.json.encode({**self.others, "prompt": []})
        return before[:-2], memoryview(self.prompts[at]), b"]}"


class BrokenAnswer(PPDError):
    """An answer that cannot be merged; `event` is the error event that it ended with, if any."""

    status = 502
    kind = "upstream_error"

    def __init__(self, message: str = BROKE_OFF, *, event: bytes = b"") -> None:
        super().__init__(message)
        self.event = event


def prompt_list(request: Request, limit_bytes: int) -> PromptList | None:
    """The prompts of a completion that has several; None for any other.

    BodyTooLarge if the requests would hold more than `limit_bytes` together: each
    repeats all members except its prompt.
    """
    prompt = request.fields.get("prompt", NULL)
    # The answer lists prompts given as embeddings first: left to one engine, which keeps that order.
    with_embeddings = given(request.fields, "prompt_embeds")
    if with_embeddings or not _LIST_OF_PROMPTS.match(prompt):
        return None
    prompts = msgspec.json.decode(prompt, type=list[msgspec.Raw]) if request.prompts is None else list(request.prompts)
    if len(prompts) == 1:
        return None
    others = {name: value for name, value in request.fields.items() if name != "prompt"}
    size = memoryview(prompt).nbytes + len(prompts) * sum(memoryview(value).nbytes for value in others.values())
    if size > limit_bytes:
        raise BodyTooLarge(
            f"the prompts, each with the members that they share, are larger than {limit_bytes} bytes", param="prompt"
        )
    return PromptList(prompts, request.choices // len(prompts), others)


# -- whole answers


class AnswerMerge:
    """Merges whole answers, added in any order, into one of at most `limit_bytes`."""

    def __init__(self, choices: int, limit_bytes: int) -> None:
        self._choices = choices
        self._left_bytes = limit_bytes
        self._answers: dict[int, Fields] = {}
        self._parts: dict[int, list[Fields]] = {}

    def add(self, at: int, body: bytes) -> None:
        self._left_bytes -= len(body)
        if self._left_bytes < 0:
            raise BrokenAnswer("the answers to the prompts are too long")
        answer = members(msgspec.Raw(body)) or members(msgspec.Raw(marked_nan(body) or b"")) or {}
        choices = _renumbered(answer.pop("choices", NULL), at, self._choices) or {}
        if len(choices) != self._choices:
            raise BrokenAnswer
        self._answers[at] = answer
        self._parts[at] = [choice for _, choice in sorted(choices.items())]

    def whole(self) -> bytes:
        positions = sorted(self._answers)
        merged = dict(self._answers[positions[0]])
        merged.pop("metrics", None)
        merged["choices"] = encoded([choice for at in positions for choice in self._parts[at]])
        merged["usage"] = encoded(_summed_usage([answer.get("usage", NULL) for answer in self._answers.values()]))
        return unmarked_nan(msgspec.json.encode(merged))


# -- streams


class StreamMerge:
    """Merges streams: events in the order in which they come, one usage chunk, one [DONE]."""

    def __init__(self, count: int, choices: int) -> None:
        self._count = count
        self._choices = choices
        self._frame: Fields = {}
        self._usages: list[msgspec.Raw] = []
        self._usage_chunk: Fields = {}

    def part(self, at: int) -> StreamPart:
        return StreamPart(self, at)

    def end(self) -> bytes:
        """The last events; to be called once every stream has ended."""
        usage = _summed_usage(self._usages) if len(self._usages) == self._count else None
        end = b"data: " + DONE + b"\n\n"
        if usage is None:
            return end
        return b"data: " + msgspec.json.encode({**self._usage_chunk, "usage": usage}) + b"\n\n" + end

    def merged(self, at: int, chunk: Fields) -> bytes | None:
        """The chunk as part of the merged stream; None for usage, which is summed. BrokenAnswer for bad choices."""
        self._frame = self._frame or {name: chunk[name] for name in _FRAME if name in chunk}
        choices = _renumbered(chunk.get("choices", NULL), at, self._choices)
        if choices is None:
            raise BrokenAnswer
        chunk |= self._frame
        if not choices and given(chunk, "usage"):
            self._usages.append(chunk["usage"])
            chunk.pop("metrics", None)
            self._usage_chunk = chunk
            return None
        return msgspec.json.encode({**chunk, "choices": list(choices.values())})


class StreamPart:
    """One prompt's stream. Nothing that a client could take for another prompt's answer gets through.

    BrokenAnswer for an error event, for one that cannot be parsed, and for an end without [DONE].
    """

    def __init__(self, merge: StreamMerge, at: int) -> None:
        self._merge = merge
        self._at = at
        self._splitter = EventSplitter()
        self._has_ended = False

    def feed(self, data: bytes) -> bytes:
        return b"".join([self._event(event) for event in self._splitter.feed(data)])

    def end(self) -> None:
        rest = self._splitter.rest()
        if rest.endswith((b"\r\r", b"\n\r")):  # a whole event, held as a line feed might have followed
            self._event(rest)
        if not self._has_ended:
            raise BrokenAnswer

    def _event(self, event: bytes) -> bytes:
        if type(event) is Fragment:
            raise BrokenAnswer
        data = event_data(event)
        self._has_ended = self._has_ended or data == DONE
        if self._has_ended:
            return b""
        if data is None:
            return event
        chunk = members(msgspec.Raw(data)) or members(msgspec.Raw(marked_nan(data) or b""))
        if chunk is None:
            raise BrokenAnswer
        if _is_error(chunk):
            raise BrokenAnswer(event=event)
        merged = self._merge.merged(self._at, chunk)
        return b"" if merged is None else with_data(event, unmarked_nan(merged))


def _is_error(chunk: Fields) -> bool:
    # vLLM 0.9 has the error's members at the top level.
    return given(chunk, "error") or value_of(chunk, "object") == "error"


# -- for both


def _renumbered(raw: msgspec.Raw, at: int, count: int) -> dict[int, Fields] | None:
    """The choices of prompt `at` by their index in it; None if one is not a number below `count`, or occurs twice."""
    try:
        choices = msgspec.json.decode(raw, type=list[Fields])
    except UNREADABLE:
        return None
    found: dict[int, Fields] = {}
    for choice in choices:
        index = value_of(choice, "index")
        if type(index) is not int or not 0 <= index < count or index in found:
            return None
        found[index] = choice
        choice["index"] = encoded(at * count + index)
    return found


def _summed_usage(usages: list[msgspec.Raw]) -> Any:
    counts = [decoded(usage) for usage in usages]  # members are added by name, at any depth
    return None if None in counts else reduce(_added, counts)


def _added(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: _added(one.get(name), other.get(name)) for name in one | other}
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one + other
    return one if other is None else other
