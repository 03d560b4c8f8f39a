"""What a request's head may not hold, whatever HTTP's parser lets through.

Some of it goes on to workers, whose own parsers are not ours to trust: a character that one of them takes for the end
of a line, or two lengths of which another believes the other one, would make two requests out of one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import RequestError

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
