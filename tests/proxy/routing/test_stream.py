"""What is noted of an answer, and that its bytes wait for nothing that they do not need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from ppd.proxy.assembly import new_state
from ppd.proxy.bodies.shared_bytes import SharedBytes
from ppd.proxy.config import ProxyConfig
from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Leg, Phase
from ppd.proxy.fleet.view import BareViews
from ppd.proxy.openai.answer import AnswerObserver
from ppd.proxy.openai.edits import Edits
from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.openai.stream_relay import StreamRelay
from ppd.proxy.peers.channels import Member
from ppd.proxy.routing.attempt import Attempt, OpenAnswer
from ppd.proxy.routing.router import reply_of
from ppd.proxy.routing.stream import Streaming
from tests.proxy.routing.legs.one_pair import TEXT, event
from tests.support.attempts import decision, running

FIRST, LAST = event(TEXT), b"data: [DONE]\n\n"


class Answer:
    def reached_the_client(self) -> None: ...

    def close(self) -> None: ...


class Said(list[str]):
    """What is told of the turn, in its order: an attempt's `touches`, and who learns of its end."""

    def answering(self) -> None:
        self.append("answering")

    def settled(self) -> Said:
        return self

    def close(self) -> None:
        self.append("closed")

    def completed(self, _match: object, attempt: Attempt, *_: object, **__: object) -> None:
        attempt.receipt.outcome = "ok"
        self.append("completed")

    def cancelled(self, *_: object, **__: object) -> None:
        self.append("cancelled")


class Told:
    """The other processes."""

    turns = 0

    def tell(self) -> None:
        self.turns += 1


@pytest.fixture
def said() -> Said:
    return Said()


def streaming(said: Said, first: bytes = FIRST, *, on_prefill: bool = False) -> Streaming:
    attempt = running(decision(Leg.LOCAL))
    attempt.answer, attempt.touches = cast(Any, Answer()), cast(Any, said)
    attempt.is_finished_on_prefill = on_prefill
    attempt.on_close = lambda closed: closed.touches.close()
    state, reply = new_state(ProxyConfig(), Member(), lambda: 1.0), ReplyKey(attempt.request)
    observer = AnswerObserver(Endpoint.CHAT, reply)
    relay = StreamRelay(Endpoint.CHAT, Edits(), observer)
    opened = OpenAnswer("text/event-stream", relay.feed(first), observer, reply, relay)
    return Streaming(state, cast(Any, said), state.sessions.find(attempt.request.prompt, 0.0), attempt, opened)


def test_the_caches_are_told_once_the_first_bytes_are_on_their_way(said: Said) -> None:
    stream = streaming(said)
    assert stream.begin() == FIRST
    assert said == []
    stream.written()
    assert said == ["answering"]
    assert stream.feed(LAST) == LAST
    assert said == ["answering"], "nor do the last bytes wait for what they teach"
    stream.written()
    assert said == ["answering", "completed"]
    assert stream.end() == b""
    assert said == ["answering", "completed"]
    for _ in range(2):
        stream.written()
    stream.abandon()
    assert said == ["answering", "completed", "closed"]


def test_a_turn_that_cannot_be_noted_is_closed(said: Said) -> None:
    stream = streaming(said, FIRST + LAST)
    stream._learner = cast(Any, SimpleNamespace(completed=lambda *_: 1 / 0, broken=lambda *_: said.append("broken")))
    stream.begin()
    stream.end()
    with pytest.raises(ZeroDivisionError):
        stream.written()
    assert said == ["answering", "broken", "closed"]


def test_other_processes_know_before_the_client_has_the_last_bytes(said: Said) -> None:
    stream, told = streaming(said), Told()
    stream._state.sessions.replicated = cast(Any, told)
    stream.begin()
    stream.feed(LAST)
    assert (said, told.turns) == (["answering", "completed"], 1)
    stream.written()
    assert (said, told.turns) == (["answering", "completed"], 1)


@pytest.mark.parametrize("comes", ["a reset", "its client leaves"])
def test_a_whole_answer_whose_last_bytes_were_not_written_yet_has_not_failed(said: Said, comes: str) -> None:
    stream = streaming(said)
    stream.begin()
    stream.feed(LAST)
    if comes == "a reset":
        stream.fail(LegError("it broke", worker="d1:80", phase=Phase.STREAM, cause=Cause.RESET))
        stream.written()
    else:
        stream.abandon()
    assert said == ["answering", "completed", "closed"]


def test_a_whole_answer_in_its_first_bytes_is_learnt_from_after_the_caches_know(said: Said) -> None:
    stream = streaming(said, FIRST + LAST)
    stream.begin()
    stream.written()
    assert said == ["answering", "completed"]


@pytest.mark.parametrize(
    "last",
    [LAST.replace(b"\n", b"\r"), LAST.replace(b"\n\n", b"\n\r"), LAST[:-1], LAST[:-2]],
    ids=["lines end with CR", "the last one does", "its blank line is missing", "and its line end"],
)
@pytest.mark.parametrize("breaks", [False, True], ids=["", "which breaks"])
def test_an_answer_whose_end_shows_with_the_end_of_the_stream_is_whole(said: Said, last: bytes, breaks: bool) -> None:
    stream = streaming(said)
    stream.begin()
    reset = LegError("it broke", worker="d1:80", phase=Phase.STREAM, cause=Cause.RESET)
    out = stream.feed(last) + (stream.fail(reset) if breaks else stream.end())
    stream.written()
    assert out.startswith(last) and out.strip(b"\r\n") == LAST.strip(), "and no error event"
    assert said == ["answering", "completed", "closed"], "and no failure of the worker"


def test_of_an_answer_that_nobody_takes_the_caches_are_told(said: Said) -> None:
    streaming(said).abandon()
    assert said == ["answering", "cancelled", "closed"]


def test_what_prefill_answered_is_not_in_the_cache_of_decode(said: Said) -> None:
    streaming(said, on_prefill=True).written()
    assert said == []


async def test_whoever_reads_it_piece_by_piece_has_the_caches_told(said: Said) -> None:
    pieces = streaming(said).chunks()
    assert await anext(pieces) == FIRST
    assert said == ["answering"]
    await pieces.aclose()


def test_the_first_event_is_enough_to_know_the_next_ones_by(said: Said) -> None:
    stream = streaming(said)
    stream.begin()
    before, behind = stream.plain or (b"", b"")
    assert before + b"hi" + behind == FIRST


def test_open_streams_share_what_they_know_of_their_worker_until_it_is_another() -> None:
    views, made = BareViews(), decision(Leg.LOCAL)
    known = views.of(made.decode)
    assert known == views.of(replace(made.decode, inflight=3)) and known is views.of(replace(made.decode, inflight=4))
    assert (known.worker, known.name, known.incarnation) == (made.decode.worker, "D1", "i")
    assert views.of(replace(made.decode, incarnation="j")).incarnation == "j"


@pytest.mark.parametrize(
    ("is_large", "ends_first", "is_over"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, True)],
)
async def test_a_whole_answers_turn_ends_once_it_is_written_or_first(
    said: Said, is_large: bool, ends_first: bool, is_over: bool
) -> None:
    attempt = running(decision(Leg.LOCAL))
    attempt.answer, attempt.touches = cast(Any, Answer()), cast(Any, said)
    attempt.on_close = lambda closed: closed.touches.close()
    state, key = new_state(ProxyConfig(), Member(), lambda: 1.0), ReplyKey(attempt.request)
    match = state.sessions.find(attempt.request.prompt, 0.0)
    first = SharedBytes.of([b"{}"]) if is_large else b"{}"
    opened = OpenAnswer("application/json", first, AnswerObserver(Endpoint.CHAT, key), key, None)
    reply = reply_of(state, cast(Any, said), match, attempt, opened, {"a": "b"}, ends_first=ends_first)
    ended = ["answering", "completed", "closed"]
    assert said == (ended if is_over else [])
    for _ in range(2):
        reply.written()
        assert said == ended
    body = reply.body if isinstance(reply.body, bytes) else b"".join([part async for part in reply.body.chunks()])
    assert (body, reply.content_type, reply.headers) == (b"{}", "application/json", {"a": "b"})
