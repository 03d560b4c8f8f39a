"""Lines of the access log, and what they never hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ppd.proxy.failures import Leg
from ppd.proxy.telemetry.access_log import AccessLog, as_text
from ppd.proxy.telemetry.receipts import LegRecord, Receipt


class Kept:
    def __init__(self) -> None:
        self.lost = 0
        self.lines: list[bytes] = []

    def put(self, line: bytes) -> None:
        self.lines.append(line)

    def flush(self, limit_s: float) -> None:
        pass


def logged(ended: str = "completed", path: str = "/v1/chat/completions", **members: Any) -> dict[str, Any]:
    """The line of a request that took a quarter of a second."""
    clock, kept = iter((10.0, 10.25)), Kept()
    log = AccessLog(as_json=True, lines=kept, now=lambda: next(clock), wall=lambda: "now")
    record = log.opened("POST", path)
    for name, value in members.items():
        setattr(record, name, value)
    log.closed(record, ended)
    (line,) = kept.lines
    found: dict[str, Any] = json.loads(line)
    assert line.endswith(b"\n") and (found.pop("at"), found.pop("duration_s")) == ("now", 0.25)
    return found


def receipt(**members: Any) -> Receipt:
    legs = [
        LegRecord(kind=kind, worker=name, address="10.0.0.5:8100", started_s=0.0)
        for kind, name in ((Leg.PREFILL, "P1"), (Leg.DECODE, "D2"))
    ]
    made = Receipt(
        id="r1",
        at="",
        endpoint="e",
        client="acme",
        model="m",
        stream=True,
        session="s",
        turn=1,
        kind="first",
        legs=legs,
    )
    for name, value in members.items():
        setattr(made, name, value)
    return made


def test_a_turn_is_told_with_who_where_and_how_much() -> None:
    turn = receipt(
        route="SPLIT",
        reason="first_turn",
        prompt_tokens=190,
        cached_tokens=0,
        completion_tokens=24,
        ttft_s=0.11719,
        outcome="completed",
    )
    assert logged(status=200, receipt=turn) == {
        "status": 200,
        "method": "POST",
        "path": "/v1/chat/completions",
        "client": "acme",
        "model": "m",
        "workers": ["P1", "D2"],
        "id": "r1",
        "route": "SPLIT",
        "reason": "first_turn",
        "prompt_tokens": 190,
        "cached_tokens": 0,
        "completion_tokens": 24,
        "ttft_s": 0.1172,
        "outcome": "completed",
    }


@pytest.mark.parametrize(
    ("ended", "status", "outcome", "expected"),
    [
        ("completed", 502, "failed", (502, "failed")),
        ("completed", 200, "broken", (200, "broken")),
        ("completed", 400, "rejected", (400, "rejected")),
        ("completed", 429, "running", (429, "rejected")),
        ("left", 200, "running", (200, "left")),
        ("left", 200, "cancelled", (200, "left")),
        ("left", 200, "completed", (200, "completed")),  # it had all, and did not wait for the end of the message
        ("left", 0, "running", (499, "left")),
        ("cut", 503, "running", (503, "cut")),
    ],
)
def test_how_a_turn_ended(ended: str, status: int, outcome: str, expected: tuple[int, str]) -> None:
    line = logged(ended, status=status, receipt=receipt(outcome=outcome))
    assert (line["status"], line["outcome"]) == expected


@pytest.mark.parametrize(
    ("status", "outcome"), [(200, "completed"), (404, "rejected"), (429, "rejected"), (502, "failed")]
)
def test_what_is_no_turn_ends_as_its_status_says(status: int, outcome: str) -> None:
    assert logged(path="/v1/models", status=status)["outcome"] == outcome


def test_what_is_not_known_is_left_out() -> None:
    line = logged(path="/health", status=200)
    assert line == {"status": 200, "method": "POST", "path": "/health", "outcome": "completed"}


@pytest.mark.parametrize("target", ["http://user:secret@host/v1/models", "host:443", "*", ""])
def test_what_is_asked_for_in_place_of_a_path_is_left_out(target: str) -> None:
    """The URL of a client that takes the proxy for a forward proxy may hold a password."""
    line = logged(path=target, status=400)
    assert line == {"status": 400, "method": "POST", "outcome": "rejected"}


def test_what_a_client_chose_is_cut_and_makes_no_line_of_its_own() -> None:
    line = logged(path="/" + "a" * 1000, status=404, model="m" * 10_000)
    assert len(line["path"]) == len(line["model"]) == 200
    text = as_text(
        {"path": "/a\nstatus=200 x", "model": 'a"b', "workers": ["P1", "D2"], "ttft_s": 0.5, "client": "é\x1b"}
    )
    assert text == rb'path="/a\nstatus=200 x" model="a\"b" workers=P1,D2 ttft_s=0.5 client="\u00e9\u001b"'


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    "name", ["\u202eright to left", "\x9b31m", "a\u2028b\x85c", "\x1b[31m", "a\nb\r", '"', "é", "<b>"]
)
def test_a_line_is_one_for_every_reader_and_cannot_steer_a_terminal(name: str, as_json: bool) -> None:
    kept = Kept()
    log = AccessLog(as_json=as_json, lines=kept)
    record = log.opened("POST", "/" + name)
    record.model, record.receipt = name, receipt(model=name)
    log.closed(record, "completed")
    (text,) = (line.decode() for line in kept.lines)
    assert len(text.splitlines()) == 1 and text.isascii() and text[:-1].isprintable()
    if as_json:
        assert (json.loads(text)["model"], json.loads(text)["path"]) == (name, "/" + name)
