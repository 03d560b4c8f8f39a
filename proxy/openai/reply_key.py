"""Hashes a reply while it streams, so that the next request that contains it is recognised.

The next turn's request carries the reply as the client echoes it: an assistant's message, content blocks, output items,
or simply more text. `ReplyKey` hashes the pieces in that form as they pass, and keeps none of them.
"""

from __future__ import annotations

from typing import Protocol

from ..sessions.hasher import Hasher, encoded
from ..sessions.prefix_chain import BlockHash, Chain, PrefixEnd, UnitHash
from ..sessions.text_cuts import REPLY_CHARS, reply_alone
from .prompts.tool_calls import CallHash
from .request import Endpoint, Request

_CHAT, _COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS  # quicker to look up
_RESPONSES, _MESSAGES = Endpoint.RESPONSES, Endpoint.MESSAGES


class ReplyKey:
    """The first choice of one reply; feed it what the worker sends, in order."""

    __slots__ = ("_form", "_head", "_opening", "_with_call_ids", "calls_tool", "reasoned")

    def __init__(self, request: Request) -> None:
        chain = request.prompt.chain
        mask, marks = chain.head_mask, chain.marks
        self._form = _form_for(request, chain, mask)
        self._with_call_ids = request.template.prints_call_ids
        self._head = chain.keys[marks.head] if mask and not marks.last_reply else 0
        self._opening = ""  # of the first reply after this head, see `text_cuts.reply_alone`
        self.calls_tool = False
        # The next prompt will hardly hold all that the model wrote: reasoning, or, in Messages, a reply behind one that
        # the client had begun. vLLM has the model write a message of its own there, and the client echoes both as one.
        self.reasoned = request.endpoint is _MESSAGES and chain.open_unit is not None

    def add_text(self, text: str) -> None:
        self._form.add_text(text)
        if self._head and len(self._opening) < REPLY_CHARS:
            self._opening += text[:REPLY_CHARS]

    def add_tool_call(self, index: int, id: str | None, name: str | None, arguments: str) -> None:
        self._head = 0
        self.calls_tool = True
        call = self._form.call(index)
        call.name = name or call.name
        if self._with_call_ids:
            call.id = id or call.id
        call.add(arguments)

    def add_reasoning(self) -> None:
        self.reasoned = True

    def give_up(self) -> None:
        """The reply will not be shown whole."""
        self._form = _Unknowable(self._form.hasher)
        self._head = 0

    def key(self) -> PrefixEnd | None:
        """Where the conversation's prefix ends with this reply; None if no next request could show it."""
        return self._form.end()

    def alone(self) -> int:
        """The key of a conversation's first reply, whatever it replies to; 0: it is not known by that."""
        return reply_alone(self._form.hasher, self._opening, self._head) if self._head else 0


class _Form(Protocol):
    """How one endpoint's clients echo a reply."""

    hasher: Hasher

    def add_text(self, text: str) -> None: ...  # never empty

    def call(self, index: int) -> CallHash: ...

    def end(self) -> PrefixEnd | None: ...


def _form_for(request: Request, chain: Chain, mask: int) -> _Form:
    """mask: the chain's, see `Chain.head_mask`."""
    hasher, endpoint = chain.hasher, request.endpoint
    if request.choices > 1 or request.single_engine in ("echo", "prompt_embeds"):
        return _Unknowable(hasher)
    if endpoint is _COMPLETIONS:
        return _MoreText(hasher, chain.resume()) if chain.is_text else _Unknowable(hasher)
    previous = chain.keys[-1] ^ mask
    if endpoint is _RESPONSES:
        return _Items(hasher, previous, mask)
    unit = None if chain.open_unit is None else chain.open_unit.copy()
    return _Message(hasher, previous, mask, unit) if endpoint is _CHAT else _Blocks(hasher, previous, mask, unit)


class _Message:
    """Chat: one message with all text as one string and all calls after it, whatever order they came in."""

    __slots__ = ("_calls", "_mask", "_previous", "_text", "_unit", "hasher")

    def __init__(self, hasher: Hasher, previous: int, mask: int, unit: UnitHash | None) -> None:
        """unit: the message that the client has begun, if it has. previous: the key before any other."""
        self.hasher = hasher
        self._previous = previous
        self._mask = mask
        self._unit = unit
        self._text = ""  # the first one, as long as there is no unit: that of a whole answer is hashed in one step
        self._calls: dict[int, CallHash] | None = None

    def add_text(self, text: str) -> None:
        if self._unit is None and not self._text:
            self._text = text
        else:
            self._begun().add_text(text)

    def call(self, index: int) -> CallHash:
        if self._calls is None:
            self._calls = {}
        if index not in self._calls:
            self._calls[index] = CallHash(self.hasher)
        return self._calls[index]

    def end(self) -> PrefixEnd | None:
        if self._calls:
            key = self._with_calls(self._calls).key()
        elif self._text:
            key = self.hasher.text_unit(self._previous, "assistant", None, None, encoded(self._text))
        else:
            key = self._begun().key()
        return PrefixEnd(key ^ self._mask)

    def _begun(self) -> UnitHash:
        if self._unit is None:
            self._unit = UnitHash(self.hasher, self._previous, "assistant")
            self._unit.add_text(self._text)
            self._text = ""
        return self._unit

    def _with_calls(self, calls: dict[int, CallHash]) -> UnitHash:
        unit = self._begun().copy()
        for _, call in sorted(calls.items()):
            unit.add_part(b"C", call.key(), call.size)
        return unit


class _Blocks(_Message):
    """Messages: one message of blocks, in the order in which they came."""

    __slots__ = ()

    def add_text(self, text: str) -> None:
        if self._calls:
            self._unit = self._with_calls(self._calls)
            self._calls = None
        super().add_text(text)


class _Items:
    """Responses: a message item, and an item for each call, in the order in which they came."""

    def __init__(self, hasher: Hasher, key: int, mask: int) -> None:
        self.hasher = hasher
        self._key = key
        self._mask = mask
        self._text: UnitHash | None = None
        self._calls: dict[int, CallHash] = {}
        self._empty = True

    def add_text(self, text: str) -> None:
        if self._calls:
            self._key = self._end_key()
            self._calls = {}
            self._text = None
        if self._text is None:
            self._text = UnitHash(self.hasher, self._key, "assistant")
        self._text.add_text(text)
        self._empty = False

    def call(self, index: int) -> CallHash:
        self._empty = False
        if index not in self._calls:
            self._calls[index] = CallHash(self.hasher)
        return self._calls[index]

    def end(self) -> PrefixEnd | None:
        return None if self._empty else PrefixEnd(self._end_key() ^ self._mask)

    def _end_key(self) -> int:
        key = self._key if self._text is None else self._text.key()
        for _, call in sorted(self._calls.items()):
            unit = UnitHash(self.hasher, key, "call")
            unit.add_part(b"C", call.key(), call.size)
            key = unit.key()
        return key


class _MoreText:
    """Completions: the next prompt continues with the reply's text."""

    def __init__(self, hasher: Hasher, blocks: BlockHash) -> None:
        self.hasher = hasher
        self._blocks = blocks
        self._empty = True

    def add_text(self, text: str) -> None:
        self._blocks.add(encoded(text))
        self._empty = False

    def call(self, index: int) -> CallHash:
        return CallHash(self.hasher)  # completions have none

    def end(self) -> PrefixEnd | None:
        return None if self._empty else self._blocks.end()


class _Unknowable:
    """No key: several choices, an answer that repeats the prompt, or a prompt of token ids with a reply of text."""

    def __init__(self, hasher: Hasher) -> None:
        self.hasher = hasher

    def add_text(self, text: str) -> None:
        pass

    def call(self, index: int) -> CallHash:
        return CallHash(self.hasher)

    def end(self) -> PrefixEnd | None:
        return None
