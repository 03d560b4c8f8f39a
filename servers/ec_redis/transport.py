"""How messages travel: six methods, `close` and `connect`, so that another transport is one more file, anywhere."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Protocol

from .settings import ECSettings


class TransportDown(Exception):
    """It could not be reached in time; says where, without credentials."""


class Transport(Protocol):
    """Carries bytes to engines by their names, each message to one reader; they may be lost, repeated or reordered.

    All methods may be called by several threads at once, and raise `TransportDown`. A `receive` returns None when
    nothing came for a second or so. A method that does not return keeps its thread. Once all threads of its kind are
    kept, for `couriers.HANGS_S` or longer, no request waits for embeddings, and the log says so.
    """

    def send_metadata(self, consumer: str, message: bytes) -> None: ...

    def receive_metadata(self) -> bytes | None: ...

    def send_verdict(self, producer: str, message: bytes) -> None: ...

    def receive_verdict(self) -> bytes | None: ...

    def send_data(self, consumer: str, message: bytes) -> None: ...

    def receive_data(self) -> bytes | None:
        """Nothing larger than the receiver takes is ever fetched."""

    def close(self) -> None: ...


Connect = Callable[[ECSettings, str, int], Transport]
"""What a transport's module has as `connect`: for the engine of this name, which takes data of so many bytes at most.

ValueError: a setting that it cannot use.
"""


def connect(settings: ECSettings, name: str, most_data_bytes: int) -> Transport:
    """By the transport that the settings name. ValueError: it is none, or cannot use a setting."""
    module = settings.transport if "." in settings.transport else f"{__package__}.{settings.transport}"
    try:
        make: Connect = import_module(module).connect
    except (ImportError, AttributeError, TypeError, ValueError) as exc:
        raise ValueError(
            f"ec_connector_extra_config: transport: {settings.transport!r} must be a module that has `connect`: {exc}"
        ) from exc
    return make(settings, name, most_data_bytes)
