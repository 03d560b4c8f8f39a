"""A request's head: as it was read, as it is read again where it offers an upgrade, and where it is not for us."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..errors import RequestError

OLD = "1.0"
VERSIONS = (OLD, "1.1")
OFFERED = b"xpgrade"  # the name that an Upgrade header goes by


class RequestHead(msgspec.Struct):
    """A request's head. Names of headers are in lower case, values without the space around them."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    fields: dict[str, str]  # the same as text; of a repeated one the first, as for the stock data plane
    version: str
    is_old: bool  # HTTP/1.0, which knows no chunks
    keeps_alive: bool
    read_bytes: int  # in which it came, and maybe some of a body


def without_offer(method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The head with its Upgrade header under a name that says nothing.

    HTTP lets a server pass over an offer to upgrade, and some clients make one with every request. The parser does not:
    it takes the request to end with its head, and its body for the next request.
    """
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    lines += [b"%b: %b" % (OFFERED if name == b"upgrade" else name, value) for name, value in headers]
    return b"\r\n".join((*lines, b"", b""))


def unspoken(version: str) -> RequestError:
    """Why a request of this version, or for a tunnel, is refused."""
    if version in VERSIONS:
        return RequestError("the request is for a tunnel, which nothing here makes")
    error = RequestError(f"HTTP/{version} is not spoken here")
    error.status = 505
    return error
