"""Sizes of images by the heads of their files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.media.picture_size import pixels

JPEG = (
    b"\xff\xd8\xff\xe0\x00\x04ab\xff\xff\xc2\x00\x11\x08\x00\x10\x00\x20\x03"  # an APP0, a fill byte, a frame 32 x 16
)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x02\x80\x00\x00\x01\xe0", 640 * 480),
        (b"GIF89a\x80\x02\xe0\x01", 640 * 480),
        (JPEG, 32 * 16),
        (JPEG[:8] + b"\xff" * 200 + JPEG[8:], 32 * 16),
        (
            JPEG[:8] + b"\xff" * 5000 + JPEG[8:],
            0,
        ),  # no file has so many: to look at millions of them would take seconds
        (JPEG[:2] + JPEG[2:8] * 5000 + JPEG[8:], 0),
        (b"RIFF....WEBPVP8X\n\x00\x00\x00\x00\x00\x00\x00\x7f\x02\x00\xdf\x01\x00", 640 * 480),
        (b"RIFF....WEBPVP8 ....\x00\x00\x00\x9d\x01\x2a\x80\x02\xe0\x01", 640 * 480),
        (b"RIFF....WEBPVP8L....\x2f" + (639 | 479 << 14).to_bytes(4, "little"), 640 * 480),
        (b"RIFF....WEBPODD?", 0),
        (b"BM..........", 0),
        (b"", 0),
    ],
)
def test_the_head_tells(data: bytes, found: int) -> None:
    assert pixels(data) == found


@given(st.sampled_from((b"\x89PNG\r\n\x1a\n", b"GIF89a", b"\xff\xd8\xff", JPEG[:9], b"RIFF....WEBPVP8X")), st.binary())
def test_a_broken_head_tells_nothing(head: bytes, rest: bytes) -> None:
    assert pixels(head + rest) >= 0
