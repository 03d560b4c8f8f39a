"""Every ordered fault as a client without any HTTP library sees it, and what it leaves behind in the engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

import pytest

from ppd.servers.sim.core.fault_orders import FaultKind, FaultLeg, FaultPhase, Faults, Order

HI = [{"role": "user", "content": "Tell me about the sea and the ships on it, at some length."}]
TOKENS = 6


class Seen(NamedTuple):
    status: int | None
    events: int  # in the body, [DONE] included
    end: str  # whole, cut (FIN in the middle), reset (RST), open


class Wire(NamedTuple):
    head: str
    body: bytes
    end: str

    @property
    def seen(self) -> Seen:
        status = int(self.head.split()[1]) if self.head else None
        return Seen(status, self.body.count(b"data: "), "whole" if self.is_whole and self.end == "cut" else self.end)

    @property
    def is_whole(self) -> bool:
        if "chunked" in self.head:
            return self.body.endswith(b"0\r\n\r\n")
        _, _, length = self.head.lower().partition("content-length: ")
        return bool(self.head) and int(length.split()[0]) == len(self.body)

    def header(self, name: str) -> str | None:
        fields = dict(line.lower().split(": ", 1) for line in self.head.splitlines()[1:])
        return fields.get(name)

    @property
    def chunks(self) -> list[Any]:
        lines = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


async def ask(engine: Any, *, is_silent: bool = False, **fields: Any) -> Wire:
    """is_silent: what has come when it seems that nothing more will."""
    host, _, port = engine.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"messages": HI, "max_tokens": TOKENS, "ignore_eos": True, **fields}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    data, end = b"", "cut"
    try:
        async with asyncio.timeout(0.2 if is_silent else 10):
            while piece := await reader.read(2**16):
                data += piece
    except ConnectionResetError:
        end = "reset"
    except TimeoutError:
        assert is_silent, "the engine fell silent"
        end = "open"
    writer.close()
    answer_head, _, answer = data.partition(b"\r\n\r\n")
    return Wire(answer_head.decode(), answer, end)


ALL = 1 + TOKENS + 1  # the role, the tokens, [DONE]
BREAKS = {FaultKind.RESET: "reset", FaultKind.CLOSE: "cut", FaultKind.HANG: "open", FaultKind.KILL: "cut"}
EVENTS_SENT = {FaultPhase.HEAD: 0, FaultPhase.EVENTS: 3, FaultPhase.LAST: ALL - 1, FaultPhase.END: ALL}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("phase", FaultPhase)
@pytest.mark.parametrize("kind", BREAKS)
async def test_a_broken_connection(lab: Any, kind: FaultKind, phase: FaultPhase, stream: bool) -> None:
    r = await lab.start()
    r.faults = Faults([Order(kind, phase=phase, after_events=3)])
    wire = await ask(r, stream=stream, is_silent=kind is FaultKind.HANG)
    if phase is FaultPhase.REQUEST:
        expected = Seen(None, 0, BREAKS[kind])
    else:
        expected = Seen(200, EVENTS_SENT[phase] if stream else 0, BREAKS[kind])
    assert wire.seen == expected
    assert not wire.is_whole
    if not stream:
        begun = b"" if phase in (FaultPhase.REQUEST, FaultPhase.HEAD) else b'{"id":"chatcmpl-'
        assert wire.body[:16] == begun
    await lab.until(lambda: lab.is_quiet(r))
    if kind is not FaultKind.KILL:
        assert r.counters.finished.total() == (phase is not FaultPhase.REQUEST)
        assert (await ask(r, stream=stream)).seen == Seen(200, ALL if stream else 0, "whole")


PAGE = Order(FaultKind.PAGE, status=502)
ONE_CHOICE_LESS = '{"id": "x", "object": "chat.completion", "choices": []}'


@pytest.mark.parametrize(
    ("order", "streamed", "whole"),
    [
        (Order(FaultKind.ERROR, status=404), Seen(404, 0, "whole"), Seen(404, 0, "whole")),
        (Order(FaultKind.ERROR, status=429), Seen(429, 0, "whole"), Seen(429, 0, "whole")),
        (Order(FaultKind.ERROR, status=503), Seen(503, 0, "whole"), Seen(503, 0, "whole")),
        (Order(FaultKind.ERROR, phase=FaultPhase.HEAD, status=429), Seen(200, 2, "whole"), Seen(429, 0, "whole")),
        (Order(FaultKind.ERROR, phase=FaultPhase.EVENTS, after_events=3), Seen(200, 5, "whole"), Seen(500, 0, "whole")),
        (PAGE, Seen(502, 0, "whole"), Seen(502, 0, "whole")),
        (Order(FaultKind.BODY, body=""), Seen(200, 0, "whole"), Seen(200, 0, "whole")),
        (Order(FaultKind.BODY, body="{}"), Seen(200, 0, "whole"), Seen(200, 0, "whole")),
        (Order(FaultKind.BODY, body=ONE_CHOICE_LESS), Seen(200, 0, "whole"), Seen(200, 0, "whole")),
        (Order(FaultKind.BODY, body="data: {oh\n\n"), Seen(200, 1, "whole"), Seen(200, 1, "whole")),
        (
            Order(FaultKind.BODY, phase=FaultPhase.HEAD, body="data: [DONE]\n\n"),
            Seen(200, 1, "whole"),
            Seen(200, 1, "whole"),
        ),
        (Order(FaultKind.BODY, phase=FaultPhase.HEAD, body=""), Seen(200, 0, "whole"), Seen(200, 0, "whole")),
        (Order(FaultKind.BODY, phase=FaultPhase.EVENTS, body="data: {"), Seen(200, 2, "whole"), Seen(200, 1, "whole")),
        (Order(FaultKind.ABORT), Seen(200, 3, "whole"), Seen(200, 0, "whole")),
        (Order(FaultKind.ABORT, phase=FaultPhase.EVENTS, after_events=2), Seen(200, 5, "whole"), Seen(200, 0, "whole")),
        (Order(FaultKind.SLOW, delay_s=0.001), Seen(200, ALL, "whole"), Seen(200, 0, "whole")),
    ],
    ids=lambda value: f"{value.kind}-{value.phase}" if isinstance(value, Order) else "",
)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_wrong_answer(lab: Any, order: Order, streamed: Seen, whole: Seen, stream: bool) -> None:
    r = await lab.start()
    r.faults = Faults([Order(**{name: getattr(order, name) for name in order.__struct_fields__})])
    wire = await ask(r, stream=stream)
    assert wire.seen == (streamed if stream else whole)
    if order.kind is FaultKind.BODY and not stream:
        assert wire.body == order.body.encode()
    await lab.until(lambda: lab.is_quiet(r))
    is_asked = order.phase is not FaultPhase.REQUEST or order.kind in (FaultKind.ABORT, FaultKind.SLOW)
    assert r.counters.finished.total() == is_asked
    assert (await ask(r, stream=stream)).seen == Seen(200, ALL if stream else 0, "whole")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("status", "after"), [(429, 7), (503, 3), (503, None)])
async def test_a_refusal_may_say_when_to_come_again(lab: Any, status: int, after: int | None, stream: bool) -> None:
    r = await lab.start()
    r.faults = Faults([Order(FaultKind.ERROR, status=status, retry_after_s=after)])
    wire = await ask(r, stream=stream)
    assert json.loads(wire.body)["error"]["code"] == status
    assert wire.header("retry-after") == (None if after is None else str(after))


@pytest.mark.parametrize("status", [400, 429, 500])
@pytest.mark.parametrize("events", [0, 2])
async def test_an_error_event_carries_its_code(lab: Any, status: int, events: int) -> None:
    r = await lab.start()
    r.faults = Faults([Order(FaultKind.ERROR, phase=FaultPhase.EVENTS, after_events=events, status=status)])
    chunks = (await ask(r, stream=True)).chunks
    assert ["error" in chunk for chunk in chunks] == [False] * events + [True]
    assert chunks[-1]["error"]["code"] == status
    assert r.counters.finished == {"abort": 1}


async def test_a_page_is_html(lab: Any) -> None:
    r = await lab.start()
    r.faults = Faults([Order(FaultKind.PAGE, status=502)])
    wire = await ask(r)
    assert str(wire.header("content-type")).startswith("text/html")
    assert wire.body.startswith(b"<html>")


@pytest.mark.parametrize(("phase", "tokens"), [(FaultPhase.REQUEST, 0), (FaultPhase.EVENTS, 2)])
async def test_an_engine_that_aborts_says_so(lab: Any, phase: FaultPhase, tokens: int) -> None:
    r = await lab.start()
    r.faults = Faults([Order(FaultKind.ABORT, phase=phase, after_events=tokens, times=2)])
    body = json.loads((await ask(r)).body)
    assert body["choices"][0]["finish_reason"] == "abort"
    assert body["usage"]["completion_tokens"] == tokens
    last = (await ask(r, stream=True)).chunks[-1]
    assert last["choices"][0]["finish_reason"] == "abort"
    assert (r.counters.finished, r.counters.generation_tokens) == ({"abort": 2}, 2 * tokens)


async def test_slow_events_come_one_by_one(lab: Any) -> None:
    r = await lab.start()
    loop = asyncio.get_running_loop()
    r.faults = Faults([Order(FaultKind.SLOW, delay_s=0.02)])
    begun = loop.time()
    await ask(r, stream=True)
    assert loop.time() - begun >= ALL * 0.02


async def test_orders_come_over_http(lab: Any) -> None:
    r = await lab.start()
    order = {"kind": "error", "status": 429, "leg": "plain", "retry_after_s": 1}
    assert (await lab.post(r, "/faults", {"orders": [order]})).status == 200
    assert [(await lab.chat(r, HI)).status for _ in range(2)] == [429, 200]


@pytest.mark.parametrize(
    "order", [{"kind": "cough"}, {}, {"kind": "hang", "phase": "x"}, {"kind": "error", "status": 9}]
)
async def test_an_order_that_cannot_be_is_refused(lab: Any, order: dict[str, Any]) -> None:
    r = await lab.start()
    assert (await lab.post(r, "/faults", {"orders": [order]})).status == 400


async def test_an_order_for_ps_leg_spares_a_plain_one(lab: Any) -> None:
    p = await lab.start("P")
    p.faults = Faults([Order(FaultKind.ERROR, leg=FaultLeg.PREFILL)])
    assert (await lab.chat(p, HI)).status == 200
    assert (await lab.chat(p, HI, kv_transfer_params={"do_remote_decode": True})).status == 500
