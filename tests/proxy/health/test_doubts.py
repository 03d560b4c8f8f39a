"""Which failures may be those of a URL in the request, and when they count."""

from __future__ import annotations

import pytest

from ppd.proxy.errors import LegError
from ppd.proxy.failures import ROWS, Cause, Failure, Phase
from ppd.proxy.health.doubts import Doubts, may_name_urls


@pytest.mark.parametrize("failure", ROWS, ids="-".join)
def test_a_5xx_or_silence_before_an_answer_may_be_a_urls(failure: Failure) -> None:
    """A connection that is refused or ends is the engine's own."""
    _, phase, cause = failure
    counted = list[str]()
    doubts = Doubts(has_urls=True)
    is_held = doubts.hold(LegError("", worker="", phase=phase, cause=cause), lambda: counted.append("it"))
    assert is_held == (phase in (Phase.SENT, Phase.HEADERS) and cause in (Cause.SERVER, Cause.TIMEOUT))
    doubts.answered()
    doubts.answered()
    assert counted == ["it"] * is_held, "once"


def test_without_a_url_nothing_is_in_doubt() -> None:
    exc = LegError("", worker="", phase=Phase.HEADERS, cause=Cause.SERVER)
    assert not Doubts(has_urls=False).hold(exc, lambda: None)


@pytest.mark.parametrize(
    ("body", "may"),
    [
        (b'{"image_url": "https://a.example"}', True),
        (rb'{"image_url": "HTTP:\/\/a.example"}', True),
        (rb'{"image_url": "\u0068ttp\u003A//a.example"}', True),
        (b'{"images": ["file:///a.png"]}', True),
        (b'{"image_url": "data:image/png;base64,AAAA"}', False),
        (b'{"input": "the http header"}', False),
        (b"", False),
    ],
)
def test_a_body_that_is_not_read_further_may_name_urls(body: bytes, may: bool) -> None:
    assert may_name_urls(body) is may_name_urls(memoryview(body)) is may


def test_once_the_turn_is_answered_nothing_is_in_doubt_any_more() -> None:
    """A gateway's sidecar tells of a P that failed only after the answer."""
    doubts, exc = Doubts(has_urls=True), LegError("", worker="", phase=Phase.HEADERS, cause=Cause.SERVER)
    doubts.answered()
    assert not doubts.hold(exc, lambda: None)
