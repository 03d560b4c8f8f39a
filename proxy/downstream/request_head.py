"""A request's head: as it was read, as it is read again where it offers an upgrade, and where it is not for us."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

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


_TARGET = re.compile(rb"/[\x21-\x7e]*")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def check_target(target: bytes) -> None:
    """RequestError (400) for one that names a host, or holds what no URL has; target: path and query as they came."""
    if _TARGET.fullmatch(target) is None:
        raise RequestError("the request's target: must be a path, in visible characters")


def check_values(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """RequestError (400) for a control character or two lengths; the connection ends. headers: names in lower case."""
    if _CONTROL.search(b"".join([value for _, value in headers])) is not None:
        raise RequestError("a header's value holds a control character", param=_first_bad(headers))
    names = [name for name, _ in headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        raise RequestError("content-length: must not stand beside transfer-encoding", param="content-length")


def size_of(target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> int:
    """Bytes of a head, but for its method and version."""
    return len(target) + sum([len(name) + len(value) + 4 for name, value in headers])


def head_too_large(limit_bytes: int) -> RequestError:
    return _too_large(f"the head is larger than {limit_bytes} bytes")


def too_many_lines(limit: int) -> RequestError:
    return _too_large(f"the head has more than {limit} header lines")


def _too_large(message: str) -> RequestError:
    error = RequestError(message)
    error.status = 431
    return error


def _first_bad(headers: Sequence[tuple[bytes, bytes]]) -> str:
    return next(name.decode("latin1") for name, value in headers if _CONTROL.search(value) is not None)
