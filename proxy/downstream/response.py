"""Heads and bodies of HTTP/1.1 responses as bytes. Framing: RFC 9112."""

from __future__ import annotations

import time
from collections.abc import Iterable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

from ..errors import PPDError, answer_body, comes_back

END = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def head(
    status: int, headers: Iterable[tuple[str, str]], *, size: int | None, is_chunked: bool = False, connection: str = ""
) -> bytes:
    """size: of the body; None: not known. Then, without chunks, the body ends with the connection."""
    lines = [status_line(status), f"Date: {_date(int(time.time()))}\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in headers]
    if size is not None:
        lines.append(f"Content-Length: {size}\r\n")
    elif is_chunked:
        lines.append("Transfer-Encoding: chunked\r\n")
    lines.append(f"{connection}\r\n")
    text = "".join(lines)
    ends = len(lines) + bool(connection)
    if text.count("\n") != ends or text.count("\r") != ends:
        raise ValueError("a header holds a line end")
    return text.encode("latin-1", "replace")


def refusal(error: PPDError, target: bytes = b"") -> bytes:
    """A complete response that closes the connection, for a request that is not read any further.

    target: the request's path and query, as far as they are known.
    """
    body = answer_body(error, target.partition(b"?")[0].decode("latin-1"))
    headers = (("Content-Type", "application/json"), *comes_back(error).items())
    return head(error.status, headers, size=len(body), connection=connection(False, is_old=False)) + body


def connection(keeps_alive: bool, *, is_old: bool) -> str:
    """The Connection header; empty where keep-alive is the version's default."""
    if not keeps_alive:
        return "Connection: close\r\n"
    return "Connection: keep-alive\r\n" if is_old else ""


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@lru_cache
def status_line(status: int) -> str:
    try:
        return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
    except ValueError:
        return f"HTTP/1.1 {status} \r\n"


@lru_cache(2)
def _date(now_s: int) -> str:
    return formatdate(now_s, usegmt=True)
