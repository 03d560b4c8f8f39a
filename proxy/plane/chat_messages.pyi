from collections.abc import Callable
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
    end: int
    """Where it ends in the buffer that it was found in."""
    weighs: int
    """It and all before it that are plain or known."""
    @property
    def utf8(self) -> bytes: ...
    @property
    def content(self) -> str: ...

class FoundMessage:
    digest: bytes | None
    is_item: bool
    unit: bytes | None
    """What it adds to a chain, where an earlier prompt had it: see `sessions/message_units`, for what follows too."""
    decoded: Any
    end: int
    weighs: int
    @property
    def role(self) -> str: ...
    @property
    def raw(self) -> memoryview: ...
    @property
    def letter(self) -> int: ...
    @property
    def is_call(self) -> bool: ...
    @property
    def kind(self) -> int: ...
    @property
    def size(self) -> int: ...

def messages(
    data: Buffer,
    point: TextPoint | None = None,
    known: Callable[[bytes], bytes | None] | None = None,
    *,
    are_items: bool = False,
) -> tuple[list[Any], list[int]] | None: ...
def messages_at(
    data: Buffer,
    at: int,
    most: int,
    point: TextPoint | None,
    known: Callable[[bytes], bytes | None] | None = None,
    *,
    are_items: bool = False,
    is_rest: bool = False,
) -> tuple[list[Any], list[int], int, int] | None: ...
