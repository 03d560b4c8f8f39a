"""Heads that repeat are read once; what a block says after others is what `hpack` says."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.gateway.wire.frames import Broken, Code
from ppd.proxy.gateway.wire.heads import HeadReader, Heads

CALL: Heads = [(b":method", b"POST"), (b":path", b"/a.B/C"), (b"te", b"trailers"), (b"x-forwarded-for", b"10.0.0.1")]
OTHER: Heads = [*CALL, (b"traceparent", b"00-1-2-01")]


def test_the_same_head_is_the_same_list_once_its_block_leaves_the_table_as_it_was() -> None:
    reader, encoder = HeadReader(), Encoder()
    first, second, third = (reader.read(encoder.encode(CALL)) for _ in range(3))
    assert first == second == third == CALL
    assert second is third and first is not second


def test_a_block_is_read_again_after_another_that_changed_the_table() -> None:
    reader, encoder = HeadReader(), Encoder()
    for _ in range(2):
        reader.read(encoder.encode(CALL))
    indexed = encoder.encode(CALL)
    assert reader.read(encoder.encode(OTHER)) == OTHER
    assert reader.read(encoder.encode(CALL)) == CALL
    assert reader.read(indexed) != CALL  # its places in the table are other headers' by now


def test_what_is_no_block_breaks_the_connection() -> None:
    with pytest.raises(Broken) as broken:
        HeadReader().read(b"\xff\xff\xff")
    assert broken.value.code is Code.COMPRESSION_ERROR


NAMES, VALUES = st.sampled_from([b"a", b"te", b"x-request-id", b":path"]), st.sampled_from([b"", b"1", b"2" * 3000])
HEADS = st.lists(st.tuples(NAMES, VALUES), min_size=1, max_size=3)


@given(st.lists(st.tuples(HEADS, st.booleans()), max_size=12), st.sampled_from([0, 64, 4096]))
def test_any_blocks_say_what_they_say_to_hpack(sent: list[tuple[Heads, bool]], table_bytes: int) -> None:
    reader, decoder, encoder, block = HeadReader(), Decoder(max_header_list_size=65_536), Encoder(), b""
    encoder.header_table_size = table_bytes
    for head, repeats in sent:
        block = block if repeats and block and len(block) < 8 and min(block) >= 0x80 else encoder.encode(head)
        assert reader.read(block) == decoder.decode(block, raw=True)
