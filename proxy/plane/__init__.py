"""Compiled code over bytes: sockets, HTTP/1.1, Envoy's messages, streams, what JSON is known by, what sessions keep."""

from __future__ import annotations

try:
    from .body_buffer import BodyBuffer
    from .body_parts import bones, members, value_start
    from .canonical_json import canonical_json
    from .chat_messages import FoundMessage, PlainMessage, messages, messages_at
    from .envoy_stage import envoy_stage
    from .http1 import AnswerParser, NotHttp, RequestParser
    from .packed_units import PackedUnits, TokenLine
    from .poller import Poller, SocketTransport
    from .text_digest import TextPoint
    from .text_hash import IS_FAST, TextHash
    from .text_lane import TextLane
except ImportError:  # installed without a C compiler, or not on Linux
    from .uncompiled import AnswerParser, NotHttp, RequestParser  # type: ignore[assignment]

    IS_BUILT = IS_FAST = False
else:
    IS_BUILT = True

__all__ = [
    "IS_BUILT",
    "IS_FAST",
    "AnswerParser",
    "BodyBuffer",
    "FoundMessage",
    "NotHttp",
    "PackedUnits",
    "PlainMessage",
    "Poller",
    "RequestParser",
    "SocketTransport",
    "TextHash",
    "TextLane",
    "TextPoint",
    "TokenLine",
    "bones",
    "canonical_json",
    "envoy_stage",
    "members",
    "messages",
    "messages_at",
    "value_start",
]
