from typing import Protocol

class NotHttp(ValueError): ...

class Connection(Protocol):
    def on_message_begin(self) -> None: ...
    def on_head(
        self,
        method: bytes,
        target: bytes,
        headers: list[tuple[bytes, bytes]],
        fields: dict[str, str],
        version: str,
        keeps_alive: bool,
        offers_upgrade: bool,
    ) -> None: ...
    def on_body(self, data: bytes) -> None: ...
    def on_message_complete(self) -> None: ...

class RequestParser:
    def __init__(self, connection: Connection) -> None: ...
    def feed(self, data: bytes) -> int: ...

class AnswerParser:
    status: int
    headers: dict[bytes, bytes]
    is_whole: bool
    is_followed: bool
    can_be_kept: bool
    lasts_until_closed: bool
    def feed(self, data: bytes) -> bytes: ...
    def next(self) -> None: ...
