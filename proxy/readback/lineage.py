"""The tokens that a D has computed, as its answer tells them: of a prompt and of the answer to it."""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated

import msgspec

from ..errors import UNREADABLE
from ..kv_events.block_tokens import TOKEN_BYTES, packed

DIGEST_BYTES = 16
LATEST = 16  # tokens; of fewer than these before the last one no digest can be had
_NULL = msgspec.Raw(b"null")
_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


def digest_of(ids: bytes) -> bytes:
    """ids: as `packed`."""
    return blake2b(ids, digest_size=DIGEST_BYTES).digest()


class Lineage:
    """A digest of tokens that come one after the other; few of them are kept."""

    def __init__(self) -> None:
        self.count = 0
        self._hash = blake2b(digest_size=DIGEST_BYTES)
        self._latest = b""

    def add(self, tokens: list[int]) -> None:
        self.count += len(tokens)
        ids = self._latest + packed(tokens)
        at = max(0, len(ids) - LATEST * TOKEN_BYTES)
        self._hash.update(ids[:at])
        self._latest = ids[at:]

    def digest(self, count: int) -> bytes | None:
        """Of the first so many tokens; None where that is not known."""
        left_out = self.count - count
        if count <= 0 or not 0 <= left_out * TOKEN_BYTES <= len(self._latest):
            return None
        found = self._hash.copy()
        found.update(self._latest[: len(self._latest) - left_out * TOKEN_BYTES])
        return found.digest()


class ToldHandle(msgspec.Struct, frozen=True):
    """What an answer says of the KV that its D keeps."""

    params: bytes  # JSON, as D sent it
    tokens: int  # that it stands for
    digest: bytes  # of these


class _Choice(msgspec.Struct):
    index: int = 0
    token_ids: list[_Token] | None = None
    prompt_token_ids: list[_Token] | None = None


class _Answer(msgspec.Struct):
    """A chunk or a whole body of chat and completions."""

    choices: list[_Choice] | None = None
    prompt_token_ids: list[_Token] | None = None
    kv_transfer_params: msgspec.Raw = _NULL


class _Params(msgspec.Struct):
    remote_num_tokens: int


_ANSWER = msgspec.json.Decoder(_Answer)
_PARAMS = msgspec.json.Decoder(_Params)


class HandleReader:
    """Reads a handle, and the tokens that it stands for, from an answer with one choice: whole, or event by event."""

    def __init__(self) -> None:
        self.told: ToldHandle | None = None  # once the answer has named it
        self._lineage = Lineage()
        self._is_lost = False

    def read(self, data: bytes) -> None:
        """data: an event's, or the body. What cannot be read leaves no handle."""
        if self._is_lost:
            return
        try:
            self._read(_ANSWER.decode(data))
        except UNREADABLE:
            self._is_lost, self.told = True, None

    def add(self, tokens: list[int]) -> None:
        """Of an event that has only these, and text."""
        self._lineage.add(tokens)

    def _read(self, answer: _Answer) -> None:
        self._begin(answer.prompt_token_ids)
        for choice in answer.choices or ():
            if choice.index != 0:
                raise msgspec.ValidationError("a second choice")
            self._begin(choice.prompt_token_ids)
            if choice.token_ids:
                self._lineage.add(choice.token_ids)
        if answer.kv_transfer_params != _NULL:
            count = _PARAMS.decode(answer.kv_transfer_params).remote_num_tokens
            if (digest := self._lineage.digest(count)) is not None:
                self.told = ToldHandle(bytes(answer.kv_transfer_params), count, digest)

    def _begin(self, prompt: list[int] | None) -> None:
        if prompt and not self._lineage.count:
            self._lineage.add(prompt)
