from __future__ import annotations

from typing import Any

import pytest

from benchmarks.soak.client_view import ClientView, Reception, verify
from benchmarks.soak.records import ClientOutcome
from benchmarks.soak.workload import Move
from ppd.proxy.openai.request import Endpoint

RIGHT = {0: "the right text"}
FULL = Reception(status=200)


def chat(text: str, finish: str | None = None) -> bytes:
    ending = f'"{finish}"' if finish else "null"
    return f'data: {{"choices":[{{"index":0,"delta":{{"content":"{text}"}},"finish_reason":{ending}}}]}}\n\n'.encode()


DONE = b"data: [DONE]\n\n"
BROKEN = b'data: {"error":{"message":"m","type":"upstream_error","code":502}}\n\n'
HEAD, TAIL = chat("the right"), chat(" text", "stop")


@pytest.mark.parametrize(
    ("stream", "outcome"),
    [
        (HEAD + TAIL + DONE, ClientOutcome.COMPLETED),
        (HEAD + BROKEN, ClientOutcome.BROKEN),
        (BROKEN, ClientOutcome.BROKEN),
        (HEAD + BROKEN + DONE, ClientOutcome.UNMARKED),
        (HEAD + BROKEN + TAIL, ClientOutcome.UNMARKED),
        (HEAD + TAIL + DONE + TAIL, ClientOutcome.WRONG),
        (HEAD, ClientOutcome.UNMARKED),
        (HEAD + TAIL + DONE + b"data: {", ClientOutcome.UNMARKED),
        (HEAD + DONE, ClientOutcome.WRONG),
        (DONE, ClientOutcome.WRONG),
        (HEAD + chat("", "abort") + DONE, ClientOutcome.BROKEN),
        (chat("another text", "stop") + DONE, ClientOutcome.WRONG),
        (chat("another text") + BROKEN, ClientOutcome.WRONG),
        (b"data: \x00garbage\n\n", ClientOutcome.BROKEN),
    ],
)
def test_a_stream_is_right_whole_or_says_that_it_is_not(stream: bytes, outcome: ClientOutcome) -> None:
    view = ClientView(Endpoint.CHAT)
    view.feed(stream)
    assert verify(view, FULL, RIGHT, Move.CONTINUE)[0] is outcome


def test_a_stream_may_come_in_any_pieces() -> None:
    view, events = ClientView(Endpoint.CHAT), 0
    for at in range(len(HEAD + TAIL + DONE)):
        events += view.feed((HEAD + TAIL + DONE)[at : at + 1])
    assert events == 2
    assert verify(view, FULL, RIGHT, Move.CONTINUE)[0] is ClientOutcome.COMPLETED


@pytest.mark.parametrize(
    ("endpoint", "stream"),
    [
        (
            Endpoint.COMPLETIONS,
            b'data: {"choices":[{"index":0,"text":"the right text","finish_reason":"stop"}]}\n\n' + DONE,
        ),
        (
            Endpoint.RESPONSES,
            b'data: {"type":"response.output_text.delta","delta":"the right text"}\n\n'
            b'event: response.incomplete\ndata: {"type":"response.incomplete"}\n\n',
        ),
        (
            Endpoint.MESSAGES,
            b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"the right text"}}\n\n'
            b'data: {"type":"message_stop"}\n\n' + DONE,
        ),
    ],
)
def test_every_api_has_its_own_end(endpoint: Endpoint, stream: bytes) -> None:
    whole, cut = ClientView(endpoint), ClientView(endpoint)
    whole.feed(stream)
    assert verify(whole, FULL, RIGHT, Move.OPEN) == (ClientOutcome.COMPLETED, "")
    cut.feed(stream.split(b"\n\n")[0] + b"\n\n")
    assert verify(cut, FULL, RIGHT, Move.OPEN)[0] is ClientOutcome.UNMARKED


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (Endpoint.CHAT, b'{"choices":[{"index":0,"message":{"content":"the right text"},"finish_reason":"stop"}]}'),
        (Endpoint.COMPLETIONS, b'{"choices":[{"index":0,"text":"the right text","finish_reason":"length"}]}'),
        (Endpoint.RESPONSES, b'{"error":null,"output":[{"content":[{"text":"the right text"}]}]}'),
        (Endpoint.MESSAGES, b'{"content":[{"type":"text","text":"the right text"}],"stop_reason":"end_turn"}'),
    ],
)
def test_a_whole_body_is_compared_too(endpoint: Endpoint, body: bytes) -> None:
    for text, outcome in ((body, ClientOutcome.COMPLETED), (body.replace(b"right", b"wrong"), ClientOutcome.WRONG)):
        view = ClientView(endpoint)
        view.read_whole(text)
        assert verify(view, FULL, RIGHT, Move.OPEN)[0] is outcome


def test_half_a_message_says_so_by_having_no_reason_to_stop() -> None:
    view = ClientView(Endpoint.MESSAGES)
    view.read_whole(b'{"content":[{"type":"text","text":"the ri"}],"stop_reason":null}')
    assert verify(view, FULL, RIGHT, Move.OPEN)[0] is ClientOutcome.BROKEN


def test_every_choice_counts() -> None:
    view = ClientView(Endpoint.CHAT)
    view.feed(HEAD + TAIL + DONE)
    assert verify(view, FULL, {0: "the right text", 1: "more"}, Move.OPEN)[0] is ClientOutcome.WRONG


@pytest.mark.parametrize(
    ("reception", "move", "view", "outcome"),
    [
        ({"status": 0, "left": True}, Move.OPEN, b"", ClientOutcome.LEFT),
        ({"status": 200, "left": True}, Move.OPEN, HEAD, ClientOutcome.LEFT),
        ({"status": 200, "left": True}, Move.OPEN, chat("a wrong"), ClientOutcome.WRONG),
        ({"status": 0, "lost": True}, Move.OPEN, b"", ClientOutcome.UNANSWERED),
        ({"status": 200, "lost": True}, Move.OPEN, HEAD, ClientOutcome.UNANSWERED),
        ({"status": 504}, Move.OPEN, b"", ClientOutcome.TIMED_OUT),
        ({"status": 503}, Move.OPEN, b"", ClientOutcome.FAILED),
        ({"status": 400}, Move.OPEN, b"", ClientOutcome.FAILED),
        ({"status": 400}, Move.IMPOSSIBLE, b"", ClientOutcome.REJECTED),
        ({"status": 500}, Move.IMPOSSIBLE, b"", ClientOutcome.FAILED),
    ],
)
def test_what_a_client_sees_has_one_name(reception: Any, move: Move, view: bytes, outcome: ClientOutcome) -> None:
    answer = ClientView(Endpoint.CHAT)
    answer.feed(view)
    assert verify(answer, Reception(**reception), RIGHT, move)[0] is outcome


def test_an_answer_to_what_nobody_can_answer_is_wrong() -> None:
    view = ClientView(Endpoint.CHAT)
    view.feed(HEAD + TAIL + DONE)
    assert verify(view, FULL, None, Move.IMPOSSIBLE)[0] is ClientOutcome.WRONG
