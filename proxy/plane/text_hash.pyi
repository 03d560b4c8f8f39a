from collections.abc import Sequence
from typing import Any

from .body_parts import PlainMessage
from .text_digest import TextPoint

IS_FAST: bool

class TextHash:
    def __init__(self, secret: bytes, point: TextPoint, bits: int, before: dict[str, bytes], longest: int) -> None: ...
    def key(self, previous: int, before: bytes, text: bytes) -> int: ...
    def cuts(self, domain: bytes, previous: int, before: bytes, text: bytes, offsets: list[int]) -> list[int]: ...
    def run(
        self, messages: list[Any], at: int, previous: int, size: int, around: int
    ) -> tuple[Sequence[int], Sequence[int], bytes | bytearray, Sequence[tuple[int, bytes, PlainMessage, int]]]: ...
