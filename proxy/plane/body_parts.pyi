from typing import Any

from typing_extensions import Buffer

from .text_digest import TextPoint

class PlainMessage:
    role: str
    name: str | None
    tool_call_id: str | None
    tool_calls: None
    function_call: None
    size: int
    @property
    def utf8(self) -> bytes: ...
    @property
    def content(self) -> str: ...

def value_start(body: bytes, wanted: bytes) -> int | None: ...
def members(body: bytes) -> list[tuple[str, int, int, int]] | None: ...
def messages(data: Buffer, point: TextPoint | None = None) -> tuple[list[Any], list[int]] | None: ...
def messages_at(
    data: Buffer, at: int, most: int, point: TextPoint | None
) -> tuple[list[Any], list[int], int, int] | None: ...
