"""A request's head: as the parser read it, the checks on it, and its rewriting where it offers an upgrade."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from ..errors import HeadTooLarge, RequestError

OLD = "1.0"
VERSIONS = (OLD, "1.1")
OFFERED = b"xpgrade"  # an Upgrade header is renamed to this

_TARGET = re.compile(rb"/[\x21-\x7e]*")
_ORIGIN = re.compile(rb"https?://((?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?)(?=[/?]|$)", re.I)
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class RequestHead(msgspec.Struct):
    """Header names are in lower case; values have no space around them."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    fields: dict[str, str]  # the headers as text; of a repeated one the first
    version: str
    is_old: bool  # HTTP/1.0, which has no chunks
    keeps_alive: bool
    read_bytes: int  # size of the reads it came in, maybe with part of the body
    body_bytes: int  # as its Content-Length tells; 0 without one


def not_supported(version: str) -> RequestError:
    if version in VERSIONS:  # then the method is CONNECT
        return RequestError("CONNECT is not supported")
    error = RequestError(f"HTTP/{version} is not supported")
    error.status = 505
    return error


def without_offer(method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The head with its Upgrade header renamed, so that the parser ignores it.

    HTTP lets a server ignore an offer to upgrade, and some clients make one with every request. The parser does not
    ignore it: for it the request ends with its head, and the body is the next request.
    """
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    lines += [b"%b: %b" % (OFFERED if name == b"upgrade" else name, value) for name, value in headers]
    return b"\r\n".join((*lines, b"", b""))


def origin_form(
    target: bytes, headers: list[tuple[bytes, bytes]], fields: dict[str, str]
) -> tuple[bytes, list[tuple[bytes, bytes]], dict[str, str]]:
    """Path and query of a target that is a whole URL, and the headers with its host (RFC 9112, 3.2.2).

    A target that is no URL of HTTP is returned as it is; so are the headers if Host is not there exactly once.
    """
    url = _ORIGIN.match(target)
    if url is None:
        return target, headers, fields
    rest = target[url.end() :]
    if [name for name, _ in headers].count(b"host") == 1:
        headers = [(name, url[1] if name == b"host" else value) for name, value in headers]
        fields = {**fields, "host": url[1].decode("latin-1")}
    return (rest if rest.startswith(b"/") else b"/" + rest), headers, fields


def size_of(target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> int:
    """Bytes of a head, without its method and version."""
    return len(target) + sum([len(name) + len(value) + 4 for name, value in headers])


def head_too_large(limit_bytes: int) -> RequestError:
    return HeadTooLarge(f"the head is larger than {limit_bytes} bytes")


def too_many_lines(limit: int) -> RequestError:
    return HeadTooLarge(f"the head has more than {limit} header lines")


def check_target(target: bytes) -> None:
    """RequestError (400) unless the target is a path and query of visible ASCII characters."""
    if _TARGET.fullmatch(target) is None:
        raise RequestError("the request's target: must be a path, in visible characters")


def check_values(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """RequestError (400) for a control character, or two framings of the body. headers: names in lower case."""
    if _CONTROL.search(b"".join([value for _, value in headers])) is not None:
        raise RequestError("a header's value holds a control character", param=_first_bad(headers))
    names = [name for name, _ in headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        raise RequestError("content-length: is not allowed together with transfer-encoding", param="content-length")


def with_host_for_app(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The application fails, before it could answer, on a host with a label that no name has; it needs none."""
    return [(name, b"" if name == b"host" and not _is_host(value) else value) for name, value in headers]


def _is_host(value: bytes) -> bool:
    try:
        value.partition(b":")[0].decode("latin-1").lower().encode("idna")
    except UnicodeError:
        return False
    return True


def _first_bad(headers: Sequence[tuple[bytes, bytes]]) -> str:
    return next(name.decode("latin1") for name, value in headers if _CONTROL.search(value) is not None)
