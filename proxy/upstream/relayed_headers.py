"""Which headers of a worker's answer go to the client, beside those that describe its body."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from ..config import refused

_PATTERN = re.compile(r"[a-z0-9!#$%&'+.^_`|~-]{2,64}\*?")

# Of the connection to the worker, of the body that the proxy frames anew, of the proxy's own, or naming the worker.
_NEVER = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    "upgrade content-length content-type content-encoding date server via forwarded location set-cookie x-request-id "
    "alt-svc retry-after".split()
)
_NEVER_BEGINS = (b"x-ppd-", b"x-forwarded-", b"access-control-")
_NEVER_BYTES = frozenset(name.encode() for name in _NEVER)


class RelayedHeaders:
    """The setting `relay_headers`: names in lower case, and beginnings of names that end with a star."""

    def __init__(self, patterns: Collection[str]) -> None:
        """ConfigError for what is no such pattern, and for a header that never goes on."""
        for pattern in patterns:
            if not _PATTERN.fullmatch(pattern) or pattern in _NEVER:
                allowed = "headers' names in lower case, or their beginnings and a *; never "
                raise refused("relay_headers", pattern, allowed + ", ".join(sorted(_NEVER)))
        chosen = [pattern.encode() for pattern in patterns]
        self._names = frozenset(pattern for pattern in chosen if not pattern.endswith(b"*"))
        self._beginnings = tuple(pattern[:-1] for pattern in chosen if pattern.endswith(b"*"))

    def of(self, headers: Mapping[bytes, bytes], address: str) -> dict[str, str]:
        """headers: the answer's, by names in lower case; address: the worker's, which no client may learn."""
        found: dict[str, str] = {}  # `dict[str, str]()` takes ten times as long
        for name, value in headers.items():
            if (name in self._names or name.startswith(self._beginnings)) and _may_pass(name, value, address):
                found[name.decode("latin-1")] = value.decode("latin-1")
        return found


class EndToEndHeaders:
    """All but those of the connection to the worker, and of the body's framing."""

    def of(self, headers: Mapping[bytes, bytes], address: str) -> dict[str, str]:
        kept = ((name, value) for name, value in headers.items() if name not in HOP_BY_HOP)
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in kept}


# RFC 9110, 7.6.1
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade content-length date".split()
)


def _may_pass(name: bytes, value: bytes, address: str) -> bool:
    if name in _NEVER_BYTES or name.startswith(_NEVER_BEGINS):
        return False
    host = address.rpartition(":")[0].strip("[]")
    is_telling = "." in host or ":" in host  # a word such as "d1" may occur anywhere
    return address.encode() not in value and not (is_telling and host.encode() in value)
