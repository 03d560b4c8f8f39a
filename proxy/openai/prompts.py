"""Reads each endpoint's prompt into a chain of hashes, one for each message or item.

Hashed is what a chat template renders: role, name, text, tool calls and results, and media by content. Not hashed are
members that are null or absent, `cache_control` (clients move it from turn to turn), ids and states that a server gave
its own items, and reasoning, which most templates leave out of earlier turns and many clients do not send back.
A string and a list with that one text are the same content; two texts are never the same as their concatenation.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TypeVar

import msgspec
from msgspec.json import Decoder, Encoder

from ..errors import RequestError
from ..sessions.prefix_chain import UNIT_OVERHEAD_BYTES, BlockHash, Chain, Hasher, UnitHash
from ..sessions.text_kinds import SAMPLED_UNITS, sample
from ..sessions.tool_call_hash import CallHash
from .units import structure

MEDIA_BYTES = 4096
"""The size in prompt bytes of an image, sound or file: about a thousand tokens. Its own size says nothing."""

LONG_ARGUMENTS_BYTES = 1024 * 1024
"""No model writes so much in one call. Longer arguments are compared as they are: another way to write them is another
call."""

Members = dict[str, msgspec.Raw]
Content = str | list[str | Members] | None
T = TypeVar("T")

LIST_LIMIT = 1024  # prompts in one request: vLLM's own default (VLLM_MAX_COMPLETION_PROMPTS)

_ABSENT = msgspec.Raw(b"")
_TEXT = frozenset(("text", "input_text", "output_text"))
_REASONING = frozenset(("reasoning", "thinking", "redacted_thinking"))
_CALLS = frozenset(("function_call", "custom_tool_call"))
_SERVERS_OWN = frozenset(("id", "status"))
_BILLING = "x-anthropic-billing-header"  # differs in every request of a client; vLLM drops it too


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT  # what a custom tool has instead


class _ToolCall(msgspec.Struct):
    id: str | None = None
    function: _Function | None = None
    custom: _Function | None = None


class _Message(msgspec.Struct, kw_only=True):
    role: str
    content: Content = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None


_ANY: Decoder[object] = Decoder(object)
_STRING: Decoder[str | None] = Decoder(str | None)
_FLAG: Decoder[bool | None] = Decoder(bool | None)
_CONTENT: Decoder[Content] = Decoder(Content)
_MESSAGE: Decoder[_Message] = Decoder(_Message)
_MESSAGES: Decoder[list[_Message]] = Decoder(list[_Message])
_ITEMS: Decoder[str | list[Members]] = Decoder(str | list[Members])
_PROMPT: Decoder[str | list[int | str | list[int]] | None] = Decoder(str | list[int | str | list[int]] | None)
_CANONICAL = Encoder(order="deterministic")


def read(decoder: Decoder[T], raw: msgspec.Raw, name: str) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise RequestError(f"{name}: {exc}", param=name) from exc


class _Units:
    """Builds the chain of one prompt, unit by unit."""

    def __init__(self, hasher: Hasher, seed: int, size: int) -> None:
        self._hasher = hasher
        self._key = seed
        self._size = size
        self._unit: UnitHash | None = None
        self.keys: list[int] = []
        self.ends: list[int] = []
        self._newest = _newest_texts()

    def begin(self, role: str, name: str | None = None, call_id: str | None = None) -> UnitHash:
        self._close()
        self._unit = UnitHash(self._hasher, self._key, role, name or "", call_id or "")
        return self._unit

    def chain(self) -> Chain:
        self._close()
        return Chain(tuple(self.keys), tuple(self.ends), self._hasher, samples=tuple(map(sample, self._newest)))

    def _close(self) -> None:
        if self._unit is not None:
            self._key = self._unit.key()
            self._size += self._unit.size
            self._newest.append(self._unit.text)
            self._unit = None
            self.keys.append(self._key)
            self.ends.append(self._size)


class PromptReader:
    """Makes the chain of each endpoint's prompt."""

    def __init__(self, hasher: Hasher) -> None:
        self.hasher = hasher

    def seed(self, scope: int, salt: str, rendered: Mapping[str, msgspec.Raw]) -> tuple[int, int]:
        """The key before the first unit, and the bytes of what is rendered before it."""
        if not salt and not rendered:
            return self.hasher.usual_key(b"S", "", previous=scope), 0  # cached: holds no client data
        parts: list[str | bytes] = [salt]
        size = 0
        for name, raw in rendered.items():
            value, value_size = self.hasher.once(bytes(raw), partial(_canonical, name))
            if value_size:
                parts += (name, f"{value:x}")
                size += value_size
        return self.hasher.key(b"S", *parts, previous=scope), size

    def system(self, seed: int, size: int, raw: msgspec.Raw | None, name: str) -> tuple[int, int]:
        content = None if raw is None else read(_CONTENT, raw, name)
        if not content:
            return seed, size
        unit = UnitHash(self.hasher, seed, "system")
        self._add_content(unit, content, system=True)
        return unit.key(), size + unit.size

    def chat(self, seed: int, size: int, raw: msgspec.Raw, *, prefills: bool) -> Chain:
        """`messages` of chat completions and of Anthropic's Messages.

        prefills: a last message by the assistant starts the reply, and the client will echo both as one message.
        """
        messages = read(_MESSAGES, raw, "messages")
        if not messages:
            raise RequestError("messages: must not be empty", param="messages")
        last = messages[-1]
        continues = prefills and last.role == "assistant" and not last.tool_calls
        hasher, key, keys, ends = self.hasher, seed, list[int](), list[int]()
        unit: UnitHash | None = None
        newest = _newest_texts()
        for message in messages:
            content = message.content
            # Fast path: nearly all messages are a text and nothing else.
            if (
                type(content) is str
                and content
                and not (message.tool_calls or message.function_call)
                and not (message.role == "system" and content.startswith(_BILLING))
                and not (continues and message is last)
            ):
                text = content.encode("utf-8", "surrogatepass")
                key = hasher.text_unit(key, message.role, message.name, message.tool_call_id, text)
                size += UNIT_OVERHEAD_BYTES + len(text)
                newest.append(text)
            else:
                unit = self._message_unit(key, message)
                key = unit.key()
                size += unit.size
                newest.append(unit.text)
                unit.text = ""
            keys.append(key)
            ends.append(size)
        return Chain(
            tuple(keys),
            tuple(ends),
            hasher,
            open_unit=unit if continues else None,
            samples=tuple(map(sample, newest)),
        )

    def open_unit(self, previous: int, message: bytes) -> UnitHash:
        """The unit of a last message that the reply continues. previous: the key before it."""
        unit = self._message_unit(previous, read(_MESSAGE, msgspec.Raw(message), "messages"))
        unit.text = ""
        return unit

    def _message_unit(self, previous: int, message: _Message) -> UnitHash:
        unit = UnitHash(self.hasher, previous, message.role, message.name or "", message.tool_call_id or "")
        self._add_content(unit, message.content, system=message.role == "system")
        for call in message.tool_calls or ():
            self._add_call(unit, call.id, call.function or call.custom)
        if message.function_call is not None:
            self._add_call(unit, None, message.function_call)
        return unit

    def responses(self, seed: int, size: int, raw: msgspec.Raw, stored: int | None) -> Chain:
        items = read(_ITEMS, raw, "input")
        units = _Units(self.hasher, seed if stored is None else stored, size)
        if stored is not None:  # the input continues this response
            units.keys.append(stored)
            units.ends.append(0)
        if isinstance(items, str):
            unit = units.begin("user")
            unit.add_text(items)
            unit.show(items)
        elif not items:
            raise RequestError("input: must not be empty", param="input")
        else:
            for item in items:
                self._add_item(units, item)
        chain = units.chain()
        if len(chain.keys) == (stored is not None):  # only reasoning: an empty unit stands for it
            units.begin("")
            chain = units.chain()
        return chain

    def completions(self, seed: int, raw: msgspec.Raw) -> tuple[Chain, int]:
        """The chain of `prompt`, and how many prompts it holds: several are one unit, known only as a whole."""
        if memoryview(raw).nbytes > LIST_LIMIT and bytes(raw).count(b"[") > LIST_LIMIT + 1:
            _check_lists(bytes(raw))
        prompt = read(_PROMPT, raw, "prompt")
        several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
        if isinstance(prompt, list) and several and len(prompt) > LIST_LIMIT:
            raise too_many_prompts()
        prompts: list[object] = [*prompt] if isinstance(prompt, list) and several else [prompt]
        data = [_prompt_bytes(one) for one in prompts]
        if len(data) == 1:
            kind, text = data[0]
            blocks = BlockHash(self.hasher, self.hasher.key(b"P", f"{seed:x}", kind))
            blocks.add(text)
            tail = text[blocks.ends[-1] :]
            return Chain(tuple(blocks.keys), tuple(blocks.ends), self.hasher, text, tail, is_text=kind == "text"), 1
        keys = [self.hasher.key(b"P", kind, f"{len(text):x}", text) for kind, text in data]
        whole = self.hasher.key(b"P", f"{seed:x}", *(f"{key:x}" for key in keys))
        kind, text = data[0]
        samples = (sample(text),) if kind == "text" else ()
        return Chain((whole,), (sum(len(text) for _, text in data),), self.hasher, samples=samples), len(data)

    def embeddings(self, seed: int, raw: msgspec.Raw) -> Chain:
        key = self.hasher.key(b"E", f"{seed:x}", _CANONICAL.encode(read(_ANY, raw, "prompt_embeds")))
        return Chain((key,), (MEDIA_BYTES,), self.hasher, samples=(None,))

    def _add_content(self, unit: UnitHash, content: Content, *, system: bool = False) -> None:
        for part in (content,) if isinstance(content, str) else content or ():
            unit.begin_text()
            if (text := _part_text(part)) is not None:
                if not (system and text.startswith(_BILLING)):
                    unit.add_text(text)
                    unit.show(text)
            elif not isinstance(part, str):
                self._add_part(unit, part)

    def _add_part(self, unit: UnitHash, part: Members) -> None:
        match _string(part, "type"):
            case "tool_use":
                call = _Function(_string(part, "name"), part.get("input", _ABSENT))
                self._add_call(unit, _string(part, "id"), call)
            case "tool_result":
                failed = "is_error" in part and read(_FLAG, part["is_error"], "is_error")
                result = UnitHash(self.hasher, 0, "tool", "error" if failed else "", _string(part, "tool_use_id") or "")
                self._add_content(result, _content(part, "content"))
                unit.add_part(b"R", result.key(), result.size)
                unit.show(result.text)
            case _:
                self._add_opaque(unit, part)  # media and unknown parts: all their members count

    def _add_opaque(self, unit: UnitHash, part: Members) -> None:
        members = {name: value for name, raw in part.items() if (value := _pruned(read(_ANY, raw, name))) is not None}
        image = members.get("image_url")
        if isinstance(image, dict):  # clients write an image nested or flat
            members = {**members, **image, "image_url": image.get("url")}
            members.pop("url", None)
        if members.get("detail") == "auto":
            del members["detail"]
        members.pop("cache_control", None)
        text = _CANONICAL.encode(members)
        unit.add_part(b"M", self.hasher.key(b"M", text), min(len(text), MEDIA_BYTES))
        unit.show(None)

    def _add_call(self, unit: UnitHash, id: str | None, function: _Function | None) -> None:
        function = function or _Function()
        call = CallHash(self.hasher, id, function.name)
        raw = bytes(function.arguments) or bytes(function.input)
        if len(raw) > LONG_ARGUMENTS_BYTES:
            unit.add_part(b"C", self.hasher.key(b"L", call.id, call.name, raw), len(raw))
            return
        arguments = ""
        if raw.startswith(b'"'):
            arguments = read(_STRING, msgspec.Raw(raw), "arguments") or ""
        elif raw not in (b"", b"null"):
            read(_ANY, msgspec.Raw(raw), "arguments")
            arguments = raw.decode()
        call.add(arguments)
        unit.add_part(b"C", call.key(), call.size + len(call.name))
        unit.show(arguments)

    def _add_item(self, units: _Units, item: Members) -> None:
        kind = _string(item, "type") or "message"
        if kind in _REASONING:
            return  # no unit
        if kind == "message":
            unit = units.begin(_string(item, "role") or "", _string(item, "name"))
            self._add_content(unit, _content(item, "content"))
        elif kind in _CALLS:
            call = _Function(_string(item, "name"), item.get("arguments", _ABSENT), item.get("input", _ABSENT))
            self._add_call(units.begin("call"), _string(item, "call_id"), call)
        elif kind.endswith("_output") and "output" in item:
            unit = units.begin("tool", call_id=_string(item, "call_id"))
            self._add_content(unit, _content(item, "output"))
        else:
            own = {name: raw for name, raw in item.items() if kind == "item_reference" or name not in _SERVERS_OWN}
            self._add_opaque(units.begin(kind), own)


def _newest_texts() -> deque[str | bytes | None]:
    return deque(maxlen=SAMPLED_UNITS)


def _check_lists(prompt: bytes) -> None:
    if structure(prompt).count(b"[") > LIST_LIMIT + 1:
        raise too_many_prompts()


def too_many_prompts() -> RequestError:
    return RequestError(f"prompt: must be a list of at most {LIST_LIMIT} prompts", param="prompt")


def _canonical(name: str, raw: bytes) -> bytes:
    value = _pruned(read(_ANY, msgspec.Raw(raw), name))
    return b"" if value is None or value in ([], {}) else _CANONICAL.encode(value)  # empty: renders to nothing


def first_user_text(raw: msgspec.Raw, name: str) -> str | None:
    items = read(_ITEMS, raw, name)
    if isinstance(items, str):
        return items
    for item in items:
        if _string(item, "role") == "user":
            content = _content(item, "content")
            if isinstance(content, str):
                return content
            return "\n".join(text for part in content or () if (text := _part_text(part)))
    return None


def _prompt_bytes(prompt: object) -> tuple[str, bytes]:
    """The kind of prompt, and its bytes: UTF-8 of a text, four for each token id."""
    if isinstance(prompt, str):
        return "text", prompt.encode()
    if isinstance(prompt, list) and prompt:
        try:
            return "ids", struct.pack(f"<{len(prompt)}I", *prompt)
        except struct.error as exc:
            raise RequestError("prompt: token ids must be integers from 0 to 2**32 - 1", param="prompt") from exc
    raise RequestError("prompt: must be text, token ids, or a list of either, and not empty", param="prompt")


def _part_text(part: str | Members) -> str | None:
    """The text of a text part, "" for reasoning, None for any other part."""
    if isinstance(part, str):
        return part
    kind = _string(part, "type")
    if kind in _REASONING:
        return ""
    if kind in _TEXT or (kind is None and "text" in part):
        return _string(part, "text") or ""
    return None


def _string(members: Members, name: str) -> str | None:
    return read(_STRING, members[name], name) if name in members else None


def _content(members: Members, name: str) -> Content:
    return read(_CONTENT, members[name], name) if name in members else None


def _pruned(value: object) -> object:
    if isinstance(value, dict):
        return {
            name: _pruned(member) for name, member in value.items() if member is not None and name != "cache_control"
        }
    if isinstance(value, list):
        return [_pruned(member) for member in value]
    return value
