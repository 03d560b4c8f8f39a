"""Bytes moved by compiled code: sockets with one epoll for all of them, and HTTP/1.1 parsed by llhttp."""

from __future__ import annotations

try:
    from .http1 import AnswerParser, NotHttp, RequestParser
    from .poller import Poller
except ImportError:  # installed without a C compiler, or not on Linux
    from .uncompiled import AnswerParser, NotHttp, RequestParser  # type: ignore[assignment]

    IS_BUILT = False
else:
    IS_BUILT = True

__all__ = ["IS_BUILT", "AnswerParser", "NotHttp", "Poller", "RequestParser"]
