"""The heads of an HTTP/2 connection's streams, by `hpack` (RFC 7541)."""

from __future__ import annotations

from hpack import Decoder, HPACKError

from .frames import Broken, Code

HEAD_LIMIT_BYTES = 64 * 1024

Heads = list[tuple[bytes, bytes]]


class HeadReader:
    """A gateway's heads are all the same, and so are their blocks once both sides' tables have settled.

    What a block says depends on it and on the table alone. So one that left the table as it was says the same again, as
    long as no other block comes.
    """

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=HEAD_LIMIT_BYTES)
        self._block: bytes | None = None  # the newest, if it may be taken as read
        self._heads: Heads = []

    def read(self, block: bytes) -> Heads:
        """The same list for the same head. Broken for what is no block, or a head that is too long."""
        if block == self._block:
            return self._heads
        before = self._table()
        try:
            headers = self._decoder.decode(block, raw=True)
        except HPACKError:
            raise Broken(Code.COMPRESSION_ERROR) from None
        self._heads = [(bytes(name), bytes(value)) for name, value in headers]
        self._block = block if self._table() == before else None
        return self._heads

    def _table(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        table = self._decoder.header_table
        return table.maxsize, list(table.dynamic_entries)
