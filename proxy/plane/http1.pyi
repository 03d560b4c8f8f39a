from .uncompiled import Connection

class NotHttp(ValueError): ...

class RequestParser:
    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    fields: dict[str, str]
    version: str
    keeps_alive: bool
    offers_upgrade: bool
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
