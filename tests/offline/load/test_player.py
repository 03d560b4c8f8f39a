"""The player with answers from memory and a clock that sleeping moves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from ppd.offline.experiment.records import Record
from ppd.offline.load.answer import Answer
from ppd.offline.load.dialogue import ChatAuthor, TokenAuthor
from ppd.offline.load.player import Player, Progress, Stage
from ppd.offline.load.script import Script
from ppd.offline.load.target import Api, Target
from ppd.offline.traces.turns import Message, TracedTurn

TOOK_S = 2.0


class FakeServer:
    """Answers after two seconds with what was asked for; `failing` requests, counted from 0, with their error."""

    def __init__(self, failing: Mapping[int, str] | None = None) -> None:
        self.now_s = 0.0
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.records: list[Record] = []
        self.progress: list[Progress] = []
        self.failing = failing or {}

    def now(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    async def ask(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        asked = msgspec.json.decode(body)
        self.bodies.append(asked)
        self.headers.append(headers)
        answer = Answer(sent_s=self.now_s, status=200, route="LOCAL", decode="D1")
        self.now_s += TOOK_S
        answer.ended_s = self.now_s
        if error := self.failing.get(len(self.bodies) - 1):
            answer.error, answer.status, answer.route = error, 500, ""
            return answer
        count = asked["max_tokens"]
        answer.first_token_s, answer.last_token_s = self.now_s - 1, self.now_s
        answer.prompt_tokens, answer.output_tokens = len(asked.get("prompt", ())), count
        answer.finished = answer.counted = True
        answer.token_ids, answer.texts = [1] * count, ["fine"]
        return answer

    def player(self, target: Target, until_s: float = math.inf) -> Player:
        chat = target.api is Api.CHAT
        stage = Stage(
            target=target,
            author=ChatAuthor(None, 0) if chat else TokenAuthor(tuple(range(100, 200)), 0),
            caller=self,
            now=self.now,
            sleep=self.sleep,
            record=self.records.append,
            progress=self.progress.append,
            name="test-1f",
            seed=5,
            until_s=until_s,
        )
        return Player(stage, 3)


TARGET = Target(url="http://127.0.0.1:1", model="m")
THREE = tuple(TracedTurn(new_tokens=10, output_tokens=4, think_s=3.0 * bool(index)) for index in range(3))


def script(turns: tuple[TracedTurn, ...] = THREE, **fields: Any) -> Script:
    usual: dict[str, Any] = {"number": 4, "arrival_s": 5.0, "turns": turns}
    return Script(**(usual | fields))


async def test_later_turns_wait_for_the_answer_and_the_pause() -> None:
    server = FakeServer()
    await server.player(TARGET).open_loop([script()])
    assert [record.scheduled_s for record in server.records] == [5.0, 10.0, 15.0]
    assert [record.prompt_tokens for record in server.records] == [10, 24, 38]
    assert [record.ttft_s for record in server.records] == [1.0, 1.0, 1.0]


async def test_a_gap_is_from_the_time_of_the_turn_before() -> None:
    server = FakeServer()
    turns = (TracedTurn(new_tokens=5, output_tokens=1), TracedTurn(new_tokens=5, output_tokens=1, gap_s=7.0))
    await server.player(TARGET).open_loop([script(turns)])
    assert [record.scheduled_s for record in server.records] == [5.0, 12.0]


async def test_a_gap_that_has_passed_is_waited_for_no_longer() -> None:
    server = FakeServer()
    turns = (TracedTurn(new_tokens=5, output_tokens=1), TracedTurn(new_tokens=5, output_tokens=1, gap_s=0.5))
    await server.player(TARGET).open_loop([script(turns)])
    assert [record.scheduled_s for record in server.records] == [5.0, 5.0 + TOOK_S]


async def test_answers_of_exact_lengths_are_asked_for() -> None:
    server = FakeServer()
    await server.player(TARGET).open_loop([script()])
    asked = {name: value for name, value in server.bodies[0].items() if name != "prompt"}
    assert asked == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "seed": 5,
        "max_tokens": 4,
        "min_tokens": 4,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def test_turns_behind_a_failure_are_failures_too() -> None:
    server = FakeServer({1: "out of blocks"})
    await server.player(TARGET).open_loop([script()])
    assert [(record.turn, record.status, record.error) for record in server.records] == [
        (1, 200, ""),
        (2, 500, "out of blocks"),
        (3, 0, "not sent: turn 2 failed"),
    ]
    assert [record.ttft_s for record in server.records] == [1.0, None, None]
    assert len(server.bodies) == 2
    last = server.progress[-1]
    assert (last.requests, last.in_flight, last.done, last.failed) == (3, 0, 3, 2)


async def test_a_route_is_forced_with_the_admin_key_and_the_real_one_recorded() -> None:
    server = FakeServer({2: "refused"})
    target = Target(url="http://h", model="m", forces_routes=True, admin_key="op", api_key="sk")
    await server.player(target).open_loop([script(routes=("SPLIT", "LOCAL", "SPLIT"))])
    forced = [(headers["X-PPD-Force-Route"], headers["X-Admin-Key"]) for headers in server.headers]
    assert forced == [("SPLIT", "op"), ("LOCAL", "op"), ("SPLIT", "op")]
    # What the answer says counts; where none says anything, what was asked for.
    assert [record.route for record in server.records] == ["LOCAL", "LOCAL", "SPLIT"]


async def test_no_route_is_forced_unless_planned() -> None:
    server = FakeServer()
    await server.player(TARGET).open_loop([script()])
    assert server.headers == [{}, {}, {}]


async def test_a_conversation_has_one_name_of_its_own() -> None:
    server = FakeServer()
    target = Target(url="http://h", model="m", session_header="X-Session-ID")
    await server.player(target).open_loop([script(), script(number=5)])
    names = [headers["X-Session-ID"] for headers in server.headers]
    assert sorted(set(names)) == ["test-1f-4", "test-1f-5"]


async def test_ids_that_the_server_keeps_to_itself_are_an_error() -> None:
    server = FakeServer()
    answer = server.ask

    async def silent(body: bytes, headers: Mapping[str, str]) -> Answer:
        said = await answer(body, headers)
        said.token_ids = []
        return said

    server.ask = silent  # type: ignore[method-assign]
    await server.player(TARGET).open_loop([script()])
    assert "does not tell the ids" in server.records[0].error


class Cut(FakeServer):
    """Its answers end one token early."""

    async def ask(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        answer = await super().ask(body, headers)
        answer.output_tokens -= 1
        answer.token_ids.pop()
        return answer


async def test_an_answer_that_is_not_whole_has_no_end() -> None:
    server = Cut()
    await server.player(TARGET).open_loop([script()])
    first = server.records[0]
    assert (first.error, first.first_token_s, first.last_token_s) == ("the answer has 3 of 4 tokens", 6.0, None)


async def test_a_plain_endpoint_is_asked_for_no_more_than_openai_knows_and_may_stop_early() -> None:
    server = Cut()
    target = Target(url="http://h", model="m", api=Api.CHAT, plain=True)
    turns = (TracedTurn(messages=(Message("user", "Hi"),), output_tokens=4),)
    await server.player(target).open_loop([script(turns)])
    assert {name: value for name, value in server.bodies[0].items() if name != "messages"} == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "seed": 5,
        "max_tokens": 4,
    }
    assert (server.records[0].error, server.records[0].output_tokens) == ("", 3)


async def test_an_error_that_quotes_prompt_or_key_is_cut() -> None:
    secret = "a sentence that stays between the two of us"
    server = FakeServer({0: f"key sk-9: cannot read {secret}"})
    target = Target(url="http://h", model="m", api=Api.CHAT, api_key="sk-9")
    turns = (TracedTurn(messages=(Message("user", secret),), output_tokens=3),)
    await server.player(target).open_loop([script(turns)])
    assert server.records[0].error == "key [...]: cannot read [...]"


async def test_what_is_due_after_the_end_is_neither_sent_nor_a_failure() -> None:
    server = FakeServer()
    await server.player(TARGET, until_s=12.0).open_loop([script()])
    assert [(record.turn, record.error) for record in server.records] == [(1, ""), (2, "")]


async def test_what_arrives_after_the_end_does_not_begin() -> None:
    server = FakeServer()
    await server.player(TARGET, until_s=12.0).open_loop([script(arrival_s=12.5), script(number=5, arrival_s=13.0)])
    assert server.records == []
    assert server.now_s == 0.0, "nor is it waited for"


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_closed_loop_plays_every_conversation_once(concurrency: int) -> None:
    server = FakeServer()
    await server.player(TARGET).closed_loop([script(number=number) for number in range(5)], concurrency)
    assert sorted((record.conversation, record.turn) for record in server.records) == [
        (number, turn) for number in range(5) for turn in (1, 2, 3)
    ]


async def test_in_a_closed_loop_of_one_the_next_begins_when_the_last_has_ended() -> None:
    server = FakeServer()
    one = (TracedTurn(new_tokens=5, output_tokens=1),)
    await server.player(TARGET).closed_loop([script(one, number=number) for number in range(3)], 1)
    assert [record.scheduled_s for record in server.records] == [0.0, TOOK_S, 2 * TOOK_S]
