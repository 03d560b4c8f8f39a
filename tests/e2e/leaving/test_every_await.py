"""A client that leaves while its turn awaits anything: nothing stays behind, and its talk goes on.

Each await of each of the turn's tasks is tried: as it begins, and as what it waits for has come.
"""

from __future__ import annotations

import logging
from itertools import count

import pytest

from tests.e2e.failures.fleet import FaultFleet, Talk
from tests.e2e.leaving.scenes import SCENES, Scene, aborted_legs, at_rest, remains
from tests.e2e.leaving.suspensions import Moment, left, watch_tasks

FORMS = ((True, Moment.SUSPENDED), (False, Moment.DUE))  # streamed or not


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
async def test_a_client_that_leaves_at_any_await_leaves_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    watch_tasks()
    scene, talks, wrong = SCENES[name], count(1), list[str]()
    async with scene.fleet() as fleet:
        for stream, moment in FORMS:
            for number in count(1):
                talk = await scene.talk(fleet, next(talks), stream=stream)
                ended, aborted = turns_ended(fleet), aborted_legs(fleet)
                async with scene.set(fleet):
                    leaving = await left(scene.ask(fleet, talk, stream=stream), number, moment)
                found = [*await remains(fleet, scene, aborted), *errors(caplog)]
                if not scene.is_list and turns_ended(fleet) - ended - scene.is_queued != 1:
                    found.append("not one turn in the metrics")
                wrong += [f"{moment.value} {number} {leaving.where}: {one}" for one in found]
                if not leaving.where:
                    assert leaving.task.result() == 200
                    break
                if not scene.is_list:
                    await goes_on(fleet, scene, talk, stream=stream)
        print(f"{name}: left at {next(talks) - 1 - len(FORMS)} awaits")
    assert not wrong, "\n".join(wrong)


async def goes_on(fleet: FaultFleet, scene: Scene, talk: Talk, *, stream: bool) -> None:
    body = talk.body(stream=stream)
    seen = await fleet.ask(body, forced=None if scene.opens else scene.route)
    assert seen.is_complete, (seen.status, seen.body)
    assert seen.text == await fleet.right_text(body)
    await fleet.until(lambda: at_rest(fleet))


def turns_ended(fleet: FaultFleet) -> int:
    return sum(fleet.proxy.state.metrics.turns._turns.values())


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    caplog.clear()
    return found
