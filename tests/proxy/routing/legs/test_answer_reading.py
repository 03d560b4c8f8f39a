"""What reads an answer is made before it comes, and goes by what is known when it comes."""

from __future__ import annotations

import asyncio

from ppd.proxy.connectors.leg import Handoff
from ppd.proxy.failures import Leg
from ppd.proxy.routing.attempt import Attempt
from ppd.proxy.routing.legs.answer_reading import AnswerReading
from ppd.proxy.telemetry.receipts import LegRecord
from tests.proxy.routing.legs.one_pair import TEXT, event
from tests.support.attempts import decision, running
from tests.support.requests import parse

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":9}}}\n\n'


def reading(attempt: Attempt) -> AnswerReading:
    made = AnswerReading(attempt, LegRecord(kind=Leg.DECODE, worker="", address="", started_s=0.0))
    made.prepare()
    return made


def counted(attempt: Attempt, cached_tokens: int) -> None:
    attempt.handoff = Handoff(params={}, tokens=9, cached_tokens=cached_tokens)


def test_what_was_prepared_is_used() -> None:
    made = reading(running(decision(Leg.LOCAL)))
    relay = made.relay()
    assert relay is made.relay()
    relay.feed(event(TEXT))
    assert made.observer.summary.first_token_seen


def test_a_count_of_ps_that_came_meanwhile_is_shown() -> None:
    attempt = running(decision(Leg.DECODE))
    attempt.request = parse(stream=True, stream_options={"include_usage": True})
    counted(attempt, 9)
    made = reading(attempt)
    counted(attempt, 4)
    assert b'"cached_tokens":4' in made.relay().feed(USAGE)


def test_an_answer_that_is_a_stream_though_none_was_asked_for_can_be_read() -> None:
    made = reading(running(decision(Leg.LOCAL), stream=False))
    assert made.relay().feed(event(TEXT)) == event(TEXT)


async def test_what_is_made_soon_waits_for_what_is_sent_next_and_is_there_before_an_answer() -> None:
    attempt = running(decision(Leg.DECODE))
    made = AnswerReading(attempt, LegRecord(kind=Leg.DECODE, worker="", address="", started_s=0.0))
    found = list[bool]()

    async def sends_other_leg() -> None:
        found.append(hasattr(made, "observer"))

    async def reads_answer() -> None:
        made.prepare_soon()
        heard = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(heard.set_result, None)
        await heard
        found.append(hasattr(made, "observer"))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reads_answer())
        tasks.create_task(sends_other_leg())
    assert found == [False, True]
