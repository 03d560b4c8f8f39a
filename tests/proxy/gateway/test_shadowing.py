"""A picker that only watches: what it answers (nothing), notes, books and learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from ppd.proxy.admission.keys import Client, encode, hash_of
from ppd.proxy.config import EncoderUse, Mode
from ppd.proxy.discovery.turn_report import TurnReport
from ppd.proxy.encoders.choosing import ItemDecision
from ppd.proxy.fleet.worker import Role
from ppd.proxy.gateway.headers import DESTINATION, ENCODER_ITEMS, ENCODERS, PREFILLER, TURN
from ppd.proxy.gateway.reports import Reports
from ppd.proxy.gateway.shadowing import HELD_BYTES, HELD_MESSAGES, Shadow, ShadowCall
from ppd.proxy.gateway.wire.grpc import GrpcStatus
from tests.proxy.gateway.envoy import CHAT, D1, D2, P1, R1, SAID, SPLITS, USAGE, Envoy, chat, proxy_of
from tests.proxy.gateway.test_picked_encoders import E1, E2, seen
from tests.support.fleet import has_work

REPLY = {"role": "assistant", "content": "So that"}
ANSWER = json.dumps({"choices": [{"index": 0, "message": REPLY, "finish_reason": "stop"}], "usage": USAGE}).encode()
RULED = {DESTINATION: f"{D1},{D2}", "x-request-id": "one"}


class Watching(Envoy):
    """What Envoy shows of one request, in pieces."""

    shadow: Shadow

    def __post_init__(self) -> None:
        self.shadow = Shadow()
        self.observed = True
        self.call = ShadowCall(self.proxy, self.reports, self.shadow, self)  # type: ignore[arg-type]

    async def asked(self, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.head(headers={**RULED, **(headers or {})})
        body = body or chat()
        self.tell("request_body", body=body[:100])
        self.tell("request_body", body=body[100:])
        self.tell("request_body", end_of_stream=True)
        await self.settled()

    def answered(self) -> None:
        self.tell("response_headers", headers={":status": "200", "content-type": "application/json"})
        self.tell("response_body", body=ANSWER)
        self.tell("response_body", end_of_stream=True)


@pytest.mark.parametrize(
    ("mode", "headers", "would", "did", "result"),
    [
        (Mode.ALWAYS_SPLIT, {PREFILLER: P1, DESTINATION: D2}, "SPLIT", ("SPLIT", "D2", "P1"), None),
        (Mode.ALWAYS_SPLIT, {DESTINATION: D1}, "SPLIT", ("LOCAL", "D1", ""), "other"),
        (Mode.ALWAYS_SPLIT, {DESTINATION: R1}, "SPLIT", ("REPLICA", "R1", ""), "other"),
        (Mode.REPLICA, {DESTINATION: R1}, "REPLICA", ("REPLICA", "R1", ""), "same"),
    ],
)
async def test_the_receipt_says_what_would_have_been_done_and_what_was(
    mode: Mode, headers: dict[str, str], would: str, did: tuple[str, str, str], result: str | None
) -> None:
    envoy = Watching(proxy_of((*SPLITS, f"R={R1}"), mode=mode))
    await envoy.asked(headers)
    booked = [view.name for view in envoy.proxy.state.registry.views() if has_work(view)]
    assert sorted(booked) == sorted(name for name in did[1:] if name)
    envoy.answered()
    receipt = envoy.receipt
    assert receipt.shadow is not None
    assert (receipt.shadow.route, receipt.id, receipt.reason) == (would, "one", "ruled")
    assert (receipt.route, receipt.decode, receipt.prefill) == did
    assert (receipt.outcome, receipt.prompt_tokens, envoy.is_idle) == ("completed", 800, True)
    if result is not None:
        assert +envoy.shadow.decided == {result: 1}
    assert envoy.answers == []
    # The next turn is known to be where the first one was, not where it would have been.
    later = Watching(envoy.proxy)
    asked = json.dumps({"model": "m", "messages": [*SAID, REPLY, {"role": "user", "content": "And?"}]}).encode()
    await later.asked({**headers, "x-request-id": "two"}, asked)
    assert (later.receipt.kind, later.receipt.turn) == ("next", 2)
    assert later.receipt.estimated_cached_tokens > 700
    later.call.lost()
    assert later.is_idle


@pytest.mark.parametrize(
    ("headers", "items"),
    [
        ({ENCODERS: f"{E1},{E2}"}, [f"image: {ItemDecision.ENCODED}"] * 2),
        ({ENCODERS: E1, ENCODER_ITEMS: "1"}, [f"image: {ItemDecision.LEFT}", f"image: {ItemDecision.ENCODED}"]),
        ({ENCODERS: "10.9.9.9:1"}, [f"image: {ItemDecision.LEFT}"] * 2),
        ({ENCODERS: E1, ENCODER_ITEMS: "x"}, [f"image: {ItemDecision.LEFT}"] * 2),
        ({}, [f"image: {ItemDecision.LEFT}"] * 2),
    ],
)
async def test_the_encoders_that_were_named_are_booked_and_learnt_of(headers: dict[str, str], items: list[str]) -> None:
    envoy = Watching(proxy_of((*SPLITS, f"E={E1}", f"E={E2}"), encoder=EncoderUse.ALWAYS))
    await envoy.asked(headers, seen(1, 2))
    booked = [view.requests for view in envoy.proxy.state.registry.views() if view.role is Role.ENCODE]
    assert sum(booked) == items.count(f"image: {ItemDecision.ENCODED}")
    envoy.answered()
    assert envoy.receipt.encoder is not None
    assert (envoy.receipt.encoder.items, envoy.receipt.outcome, envoy.is_idle) == (items, "completed", True)
    assert not any(view.requests for view in envoy.proxy.state.registry.views())


async def test_what_comes_before_the_decision_is_not_lost() -> None:
    envoy = Watching(proxy_of((f"D={D1}",), max_inflight=1))
    first = Watching(envoy.proxy)
    await first.asked()
    await envoy.asked({"x-request-id": "late"}, chat(seed=1))  # it waits in the queue, which the real turn did not
    envoy.answered()
    assert envoy.proxy.state.receipts.find("late") is not None
    first.answered()
    await envoy.settled()
    late = envoy.proxy.state.receipts.find("late")
    assert late is not None
    assert (late.outcome, late.prompt_tokens, envoy.is_idle) == ("completed", 800, True)


@pytest.mark.parametrize("pieces", [HELD_MESSAGES * [b"x"], [bytes(HELD_BYTES // 4 - 100)] * 4])
async def test_an_answer_that_comes_before_the_decision_is_not_held_without_end(pieces: list[bytes]) -> None:
    envoy = Watching(proxy_of((f"D={D1}",), max_inflight=1))
    await Watching(envoy.proxy).asked()
    await envoy.asked({"x-request-id": "late"}, chat(seed=1))
    for piece in pieces:
        envoy.tell("response_body", body=piece)
    assert envoy.status is None
    envoy.tell("response_body", body=bytes(400))
    await envoy.settled()
    assert envoy.status is GrpcStatus.OK
    assert envoy.proxy.state.admission.waiting == 0


@pytest.mark.parametrize("answers_first", [True, False])
async def test_a_body_that_waits_for_memory_is_followed_once_it_has_it(answers_first: bool) -> None:
    envoy = Watching(proxy_of((f"D={D1}",), body_limit_bytes=4096, body_memory_bytes=8192))
    memory = envoy.proxy.body_memory
    other = memory.room()
    assert other.want(memory.limit_bytes - 50, lambda: None, lambda exc: None)
    await envoy.asked()
    assert envoy.shadow.decided.total() == 0
    if answers_first:
        envoy.answered()
        envoy.call.lost()
    other.free()
    await envoy.settled()
    assert +envoy.shadow.decided == {"same": 1}
    if not answers_first:
        envoy.answered()
    assert (envoy.receipt.outcome, envoy.is_idle, memory.held_bytes) == ("completed", True, 0)


@pytest.mark.parametrize("ends", ["half_closed", "lost"])
async def test_a_turn_whose_call_ends_before_the_decision_is_over_with_it(ends: str) -> None:
    envoy = Watching(proxy_of((f"D={D1}",), max_inflight=1))
    first = Watching(envoy.proxy)
    await first.asked()
    await envoy.asked({"x-request-id": "late"}, chat(seed=1))
    getattr(envoy.call, ends)()
    first.answered()
    await envoy.settled()
    late = envoy.proxy.state.receipts.find("late")
    assert late is not None
    assert (late.outcome, envoy.is_idle) == ("cancelled", True)


@pytest.mark.parametrize(
    ("path", "headers", "body", "result"),
    [
        ("/v1/embeddings", RULED, b"{}", {}),
        (CHAT, {}, b"{}", {}),  # the ruling picker has refused it
        (CHAT, RULED, b"{", {"refused": 1}),
        (CHAT, {**RULED, "content-type": "text/plain"}, b"{}", {"refused": 1}),
        (CHAT, RULED, chat(user="x" * 5000), {"refused": 1}),
        (CHAT, {**RULED, DESTINATION: "10.9.9.9:1"}, chat(), {"unknown_worker": 1}),
    ],
)
async def test_what_it_cannot_follow_it_leaves_alone(
    path: str, headers: dict[str, str], body: bytes, result: dict[str, int]
) -> None:
    envoy = Watching(proxy_of(body_limit_bytes=4096))
    envoy.head(path, headers=headers)
    envoy.tell("request_body", body=body, end_of_stream=True)
    await envoy.settled()
    envoy.answered()
    envoy.call.half_closed()
    assert (envoy.answers, envoy.status, +envoy.shadow.decided) == ([], GrpcStatus.OK, result)
    assert envoy.is_idle


@pytest.mark.parametrize("first", [b"\xff\xff\xff", None])
async def test_a_call_that_asks_it_to_decide_is_refused(first: bytes | None) -> None:
    envoy = Watching(proxy_of())
    envoy.observed = False
    envoy.head() if first is None else envoy.call.message(first)
    expected = GrpcStatus.UNIMPLEMENTED if first is None else GrpcStatus.INVALID_ARGUMENT
    assert (envoy.answers, envoy.status) == ([], expected)


async def test_no_key_is_asked_for_as_the_ruling_picker_has_taken_it_away(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(encode(Client(name="one", tenant="one"), hash_of("sk-secret")))
    envoy = Watching(proxy_of((f"D={D1}",), keys_file=str(keys), admin_key="operator"))
    await envoy.asked()
    assert envoy.receipt.shadow is not None
    envoy.call.lost()


async def test_a_report_is_of_the_turn_that_the_ruling_picker_has_named() -> None:
    reports = Reports()
    envoy = Watching(proxy_of(), reports=reports)
    await envoy.asked({TURN: "its own"})
    report = TurnReport(request_id="one", turn_id="other", route="LOCAL", outcome="cancelled", status=499, ended_s=1.0)
    reports.taken(report)
    assert envoy.receipt.outcome == "running"
    reports.taken(replace(report, turn_id="its own"))
    assert envoy.receipt.outcome == "cancelled"


async def test_a_report_of_a_turn_that_was_named_twice_counts_for_neither() -> None:
    """The ruling picker may be another one, which lets a client name both."""
    reports = Reports()
    first = Watching(proxy_of(), reports=reports)
    second = Watching(first.proxy, reports=reports)
    await first.asked({TURN: "chosen"})
    receipt = first.receipt
    await second.asked({TURN: "chosen"}, chat(seed=1))
    report = TurnReport(request_id="one", turn_id="chosen", route="LOCAL", outcome="failed", status=500, ended_s=1.0)
    reports.taken(report)
    assert (receipt.outcome, second.receipt.outcome) == ("running", "running")
    first.call.lost()
    reports.taken(report)  # it may be of either still
    assert second.receipt.outcome == "running"
    second.call.lost()
    assert not reports._open
