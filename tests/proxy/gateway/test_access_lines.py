"""The access log's lines of a picker's turns: as the proxy writes them, once each, at their end."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ppd.proxy.config import Mode
from ppd.proxy.discovery.turn_report import TurnReport
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.telemetry.access_log import AccessLog
from tests.proxy.gateway.envoy import CHAT, SPLITS, USAGE, Envoy, chat, proxy_of

ANSWER = json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": "So"}}], "usage": USAGE})


class Kept:
    def __init__(self) -> None:
        self.lost = 0
        self.lines: list[dict[str, Any]] = []

    def put(self, line: bytes) -> None:
        self.lines.append(json.loads(line))

    def flush(self, limit_s: float) -> None: ...


def logging(**settings: Any) -> tuple[Envoy, Kept]:
    kept, proxy = Kept(), proxy_of(SPLITS, mode=Mode.ALWAYS_SPLIT, **settings)
    log = AccessLog(as_json=True, lines=kept, now=proxy.state.now)
    return Envoy(replace(proxy, access_log=log)), kept


def shown(line: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(line.get(name) for name in names)


async def test_a_turn_has_one_line_with_what_its_receipt_says() -> None:
    envoy, kept = logging()
    await envoy.turn()
    envoy.tell("response_headers", headers={":status": "200", "content-type": "application/json"})
    envoy.tell("response_body", body=ANSWER.encode())
    assert kept.lines == []
    envoy.tell("response_body", end_of_stream=True)
    envoy.call.half_closed()
    envoy.call.lost()
    (line,) = kept.lines
    assert shown(line, "status", "method", "path", "route", "outcome") == (200, "POST", CHAT, "SPLIT", "completed")
    assert shown(line, "prompt_tokens", "completion_tokens", "id") == (800, 3, envoy.receipt.id)
    assert line["workers"] == [envoy.receipt.decode]
    assert line["duration_s"] >= 0


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        (b"{", None, (400, "rejected")),
        (chat(), "503", (503, "failed")),
        (chat(), None, (499, "left")),  # the client went before the head
    ],
)
async def test_how_else_a_turn_ends(body: bytes, status: str | None, expected: tuple[int, str]) -> None:
    envoy, kept = logging()
    envoy.head(f"{CHAT}?key=secret")
    envoy.tell("request_body", body=body, end_of_stream=True)
    await envoy.settled()
    if status is not None:
        envoy.tell("response_headers", headers={":status": status}, end_of_stream=True)
    envoy.call.lost()
    (line,) = kept.lines
    assert shown(line, "status", "outcome") == expected
    assert "secret" not in json.dumps(line)


async def test_a_client_that_leaves_the_queue_has_its_line() -> None:
    envoy, kept = logging(max_inflight=1)
    await envoy.turn()
    second = Envoy(envoy.proxy)
    await second.turn(chat(seed=1))
    second.call.lost()
    await second.settled()
    assert [shown(line, "status", "outcome") for line in kept.lines] == [(499, "left")]
    envoy.call.lost()


async def test_a_line_does_not_count_the_wait_for_a_report() -> None:
    now_s = [100.0]
    envoy, kept = logging()
    envoy.proxy = replace(envoy.proxy, state=replace(envoy.proxy.state, now=lambda: now_s[0]))
    assert envoy.proxy.access_log is not None
    envoy.proxy = replace(envoy.proxy, access_log=AccessLog(as_json=True, lines=kept, now=lambda: now_s[0]))
    envoy = Envoy(envoy.proxy)
    await envoy.turn()
    report = TurnReport(request_id="earlier", route="SPLIT", outcome="cancelled", status=499, ended_s=0.1)
    envoy.reports.missed("earlier", "turn", WorkerId(envoy.receipt.legs[0].address))
    envoy.reports.taken(report)  # so its sidecar is waited for
    envoy.tell("response_headers", headers={":status": "200"})
    now_s[0] += 2.0
    envoy.call.half_closed()
    assert kept.lines == []
    now_s[0] += 1.0
    envoy.reports.taken(msgspec.structs.replace(report, request_id=envoy.receipt.id))
    assert [line["duration_s"] for line in kept.lines] == [2.0]


async def test_what_is_no_turn_has_its_line_too() -> None:
    envoy, kept = logging()
    envoy.head("/v1/nothing?key=secret")
    envoy.tell("request_body", body=b"{}", end_of_stream=True)
    await envoy.settled()
    envoy.call.half_closed()
    envoy.call.lost()
    (line,) = kept.lines
    assert shown(line, "status", "method", "path", "outcome") == (404, "POST", "/v1/nothing", "rejected")


async def test_a_client_that_leaves_what_is_no_turn_has_its_line() -> None:
    envoy, kept = logging()
    envoy.head("/v1/embeddings")
    envoy.call.lost()
    await envoy.settled()
    assert [shown(line, "status", "outcome") for line in kept.lines] == [(499, "left")]
