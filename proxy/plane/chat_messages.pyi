from collections.abc import Callable
from typing import Any, Protocol

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

class Unit(Protocol):
    """What a message adds to a chain: see `sessions/message_units`."""

    role: str
    size: int
    weighs: int
    """As `bones` weighs the message."""
    letter: int
    """For who says it."""
    is_call: bool
    """It is an item of Responses: calls that follow one another are of one round."""
    def key_after(self, previous: int, places: Any, unit_key: Callable[[int, bytes], int], /) -> int: ...

class FoundMessage:
    digest: bytes | None
    is_item: bool
    unit: Any
    decoded: Any
    @property
    def role(self) -> str: ...
    @property
    def raw(self) -> memoryview: ...

def messages(
    data: Buffer,
    point: TextPoint | None = None,
    known: Callable[[bytes], Any] | None = None,
    *,
    are_items: bool = False,
) -> tuple[list[Any], list[int]] | None: ...
def messages_at(
    data: Buffer, at: int, most: int, point: TextPoint | None, known: Callable[[bytes], Any] | None = None
) -> tuple[list[Any], list[int], int, int] | None: ...
