"""Which failures may be those of a URL in the request, and when they count."""

from __future__ import annotations

import pytest

from ppd.proxy.errors import LegError
from ppd.proxy.failures import ROWS, Cause, Failure, Phase
from ppd.proxy.health.doubts import Doubts
from ppd.proxy.media.items import MediaItem, MediaKind

BY_URL = MediaItem(MediaKind.IMAGE, "url", 0, 0, 0)
WITH_DATA = MediaItem(MediaKind.IMAGE, "data", 0, 0, 0, 9)


@pytest.mark.parametrize("failure", ROWS, ids="-".join)
def test_a_5xx_or_silence_before_an_answer_may_be_a_urls(failure: Failure) -> None:
    """A connection that is refused or ends is the engine's own."""
    _, phase, cause = failure
    counted = list[str]()
    doubts = Doubts([WITH_DATA, BY_URL])
    is_held = doubts.hold(LegError("", worker="", phase=phase, cause=cause), lambda: counted.append("it"))
    assert is_held == (phase in (Phase.SENT, Phase.HEADERS) and cause in (Cause.SERVER, Cause.TIMEOUT))
    doubts.answered()
    doubts.answered()
    assert counted == ["it"] * is_held, "once"


@pytest.mark.parametrize("media", [[], [WITH_DATA]], ids=["text", "data"])
def test_without_a_url_nothing_is_in_doubt(media: list[MediaItem]) -> None:
    exc = LegError("", worker="", phase=Phase.HEADERS, cause=Cause.SERVER)
    assert not Doubts(media).hold(exc, lambda: None)
