"""How messages travel: six methods, so that another transport is one more file beside `redis_transport`."""

from __future__ import annotations

from typing import Protocol


class TransportDown(Exception):
    """It could not be reached in time; says where, without credentials."""


class Transport(Protocol):
    """Carries bytes to engines by their names, each message to one reader; they may be lost, repeated or reordered.

    All methods may be called by several threads at once, and raise `TransportDown`. A `receive` returns None when
    nothing came for a second or so.
    """

    def send_metadata(self, consumer: str, message: bytes) -> None: ...

    def receive_metadata(self) -> bytes | None: ...

    def send_verdict(self, producer: str, message: bytes) -> None: ...

    def receive_verdict(self) -> bytes | None: ...

    def send_data(self, consumer: str, message: bytes) -> None: ...

    def receive_data(self) -> bytes | None:
        """Nothing larger than the receiver takes is ever fetched."""
