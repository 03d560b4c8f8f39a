from typing import Any

from typing_extensions import Buffer

class PlainMessage:
    role: str
    utf8: bytes
    name: str | None
    tool_call_id: str | None
    tool_calls: None
    function_call: None
    @property
    def content(self) -> str: ...

def member(body: bytes, wanted: bytes) -> tuple[int, int] | None: ...
def members(body: bytes) -> list[tuple[str, int, int, int]] | None: ...
def messages(data: Buffer, most: int = ...) -> tuple[list[Any], list[int]] | None: ...
