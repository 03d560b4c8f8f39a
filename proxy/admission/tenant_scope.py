"""Keeps tenants apart on workers that they share: what a leg carries so that a tenant meets only what is its own.

* `cache_salt`: vLLM hashes it into a prompt's first KV block, so prompts with different salts share no blocks, and
  `cached_tokens` tells nothing of another tenant's prompts. vLLM takes up to 128 characters, without `@ / \\` and NUL.
* Ids of conversations are replaced by keyed hashes of them.
* A stored response gets an id that shows whose it is, so nobody else can continue it, read it or cancel it. Responses'
  `request_id` becomes the id of the response.
"""

from __future__ import annotations

import hmac
import secrets
from base64 import urlsafe_b64encode
from hashlib import blake2b
from typing import Any

import msgspec

from ..openai.body_members import Edited, Fields, decoded, encoded, members

SALTED = "cache_salt"
RESPONSE_ID = "request_id"
XARGS = "vllm_xargs"

_SALT_BYTES, _ID_BYTES, _TAG_BYTES = 32, 16, 8
_RESPONSE = "resp_"
_NAMING = ("session_id", "prompt_cache_key", "conversation")
_EDITED = frozenset((*_NAMING, XARGS))


class TenantScope(msgspec.Struct, frozen=True):
    """cache: a secret of those whose prompts may share KV; ids: one of the tenant. 16 to 64 bytes each."""

    cache: bytes
    ids: bytes

    def __repr__(self) -> str:
        return "TenantScope()"  # without the secrets

    def salt(self, own: str = "") -> str:
        """own: the client's; two clients with one salt still share nothing if their tenants don't."""
        return urlsafe_b64encode(_hash(self.cache, own, _SALT_BYTES)).decode().rstrip("=")

    def id(self, name: str) -> str:
        return _hash(self.ids, f"id {name}", _ID_BYTES).hex()

    def new_response_id(self) -> str:
        name = secrets.token_hex(_ID_BYTES)
        return f"{_RESPONSE}{name}{self._tag(name)}"

    def owns(self, response_id: str) -> bool:
        """Whether this is the id of a response that was made for this tenant."""
        name = response_id.removeprefix(_RESPONSE)
        split = len(name) - 2 * _TAG_BYTES
        return split > 0 and hmac.compare_digest(name[split:].encode(), self._tag(name[:split]).encode())

    def _tag(self, name: str) -> str:
        return _hash(self.ids, f"response {name}", _TAG_BYTES).hex()

    def fields(self, fields: Fields, salt: str | None = None, *, is_response: bool = False) -> Fields:
        """The members as workers get them. salt: as `salt` made it; None: the endpoint takes none."""
        changes: Fields = {}
        if salt is not None:
            changes[SALTED] = encoded(salt)
        if not _EDITED.isdisjoint(fields):
            changes |= {name: self._named(fields[name]) for name in _NAMING if name in fields}
            xargs = members(fields[XARGS]) if XARGS in fields else None
            if xargs is not None and "session_id" in xargs:
                changes[XARGS] = encoded({**xargs, "session_id": self._named(xargs["session_id"])})
        edited = Edited.of(fields, changes)
        return self.renamed(edited) if is_response else edited

    def renamed(self, fields: Fields) -> Fields:
        """With a new id for the response."""
        return Edited.of(fields, {}, {RESPONSE_ID: encoded(self.new_response_id())})

    def _named(self, raw: msgspec.Raw) -> msgspec.Raw:
        """Ids are strings or numbers, or in an object's `id`; anything else is left for the worker to judge."""
        value: Any = decoded(raw)
        if isinstance(value, dict) and _is_id(value.get("id")):
            return encoded({**value, "id": self.id(str(value["id"]))})
        return encoded(self.id(str(value))) if _is_id(value) else raw


def _is_id(value: object) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool) and value != ""


def _hash(key: bytes, text: str, size: int) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), key=key, digest_size=size).digest()
