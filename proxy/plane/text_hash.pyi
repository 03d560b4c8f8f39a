from collections.abc import Callable, Sequence
from typing import Any

IS_FAST: bool

class TextHash:
    def __init__(
        self,
        secret: bytes,
        bits: int,
        before: dict[str, bytes],
        end: bytes,
        longest: int,
        long_end: Callable[[bytes], bytes],
    ) -> None: ...
    def key(self, previous: int, before: bytes, text: bytes, end: bytes) -> int: ...
    def run(
        self, messages: list[Any], at: int, previous: int, size: int, around: int
    ) -> tuple[
        Sequence[int], Sequence[int], Sequence[bytes], bytes | bytearray, Sequence[tuple[int, bytes, bytes, int]]
    ]: ...
