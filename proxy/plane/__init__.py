"""Compiled code over bytes: sockets with one epoll for all, HTTP/1.1 parsed by llhttp, JSON's bones, hashes of texts."""

from __future__ import annotations

try:
    from .bones import bones
    from .http1 import AnswerParser, NotHttp, RequestParser
    from .poller import Poller
    from .text_hash import IS_FAST, TextHash
except ImportError:  # installed without a C compiler, or not on Linux
    from .uncompiled import AnswerParser, NotHttp, RequestParser  # type: ignore[assignment]

    IS_BUILT = IS_FAST = False
else:
    IS_BUILT = True

__all__ = ["IS_BUILT", "IS_FAST", "AnswerParser", "NotHttp", "Poller", "RequestParser", "TextHash", "bones"]
