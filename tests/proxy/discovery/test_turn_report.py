"""The message by which a sidecar tells the picker how a turn went."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from ppd.proxy.discovery.turn_report import LEGS_LIMIT, FailedLeg, TurnReport, decode
from ppd.proxy.errors import FormatError

REPORT = TurnReport(
    request_id="r",
    route="SPLIT",
    prefill="10.0.0.5:8100",
    outcome="broken",
    status=200,
    failure="decode mid_stream: reset",
    failed_legs=[FailedLeg("decode", "127.0.0.1:8200", "mid_stream", "reset")],
    prompt_tokens=100,
    completion_tokens=None,
    prefill_cached_tokens=0,
    first_token_s=0.25,
    ended_s=1.5,
)
FIELDS: dict[str, Any] = msgspec.msgpack.decode(REPORT.encode())


def test_a_report_comes_as_it_was_sent() -> None:
    assert decode(REPORT.encode()) == REPORT
    assert decode(msgspec.msgpack.encode({**FIELDS, "of a later version": 1})) == REPORT


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": 2}, "version must be 1"),
        ({"kind": "heartbeat"}, "kind"),
        ({"request_id": 1}, "request_id"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"status": 600}, "status"),
        ({"prompt_tokens": -1}, "prompt_tokens"),
        ({"completion_tokens": 1 << 62}, "completion_tokens"),
        ({"prompt_tokens": 1 << 31}, "prompt_tokens"),
        ({"first_token_s": -1.0}, "first_token_s"),
        ({"last_token_s": math.nan}, "last_token_s"),
        ({"ended_s": math.inf}, "ended_s"),
        ({"first_token_s": 1e308, "last_token_s": None, "ended_s": 1e308}, "first_token_s"),
        ({"first_token_s": 2.0, "last_token_s": 1.0, "ended_s": 3.0}, "last_token_s"),
        ({"first_token_s": 1.0, "last_token_s": 2.0, "ended_s": 1.5}, "ended_s"),
        ({"failed_legs": FIELDS["failed_legs"] * (LEGS_LIMIT + 1)}, "failed_legs"),
    ],
)
def test_a_report_that_cannot_be_meant_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(FormatError, match=named):
        decode(msgspec.msgpack.encode({**FIELDS, **changes}))


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x81", b"\x90", b"\x91" * 100_000, REPORT.encode()[:-4]])
def test_what_is_no_report_is_refused(payload: bytes) -> None:
    with pytest.raises(FormatError, match="turn report"):
        decode(payload)
