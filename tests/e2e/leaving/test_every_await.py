"""Whatever happens while a turn awaits anything, nothing stays behind, and its talk goes on.

Each await of each of the turn's tasks is tried: as it begins, and as what it waits for has come.
"""

from __future__ import annotations

import logging
from functools import partial
from itertools import count

import pytest

from tests.e2e.failures.fleet import FaultFleet, Talk
from tests.e2e.leaving.scenes import SCENES, Scene, aborted_legs, at_rest, of_proxy, remains
from tests.e2e.leaving.suspensions import Moment, struck, watch_tasks

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
                    task, where = await struck(scene.ask(fleet, talk, stream=stream), number, moment)
                found = [*await remains(fleet, scene, aborted), *errors(caplog)]
                if not scene.is_list and turns_ended(fleet) - ended - scene.is_queued != 1:
                    found.append("not one turn in the metrics")
                wrong += [f"{moment.value} {number} {where}: {one}" for one in found]
                if not where:
                    assert task.result() == 200
                    break
                if not scene.is_list:
                    await goes_on(fleet, scene, talk, stream=stream)
        print(f"{name}: left at {next(talks) - 1 - len(FORMS)} awaits")
    assert not wrong, "\n".join(wrong)


def breaks(fleet: FaultFleet) -> None:
    """Each connection to a worker ends."""
    for call in [call for calls in fleet.proxy.upstream._calls.values() for call in calls]:
        answer = getattr(call.on_failure, "__self__", None)  # unless it is still connecting
        if answer is not None and answer._connection is not None:
            answer._connection._transport.abort()
    for pool in fleet.proxy.upstream._pools.values():
        pool.close()


def dismisses(fleet: FaultFleet) -> None:
    """No worker is known any more."""
    for view in fleet.proxy.state.registry.views():
        fleet.proxy.state.registry.remove(view.id)


STRIKES = {"every connection breaks": breaks, "every worker is dismissed": dismisses}
STRUCK = ("SPLIT by nixl", "SPLIT by nixl_push", "LOCAL", "READBACK", "by a sidecar", "encoders, then P", "the queue")


@pytest.mark.slow
@pytest.mark.parametrize("happens", STRIKES)
@pytest.mark.parametrize("name", STRUCK)
async def test_what_happens_at_any_await_of_a_turn_leaves_nothing(
    name: str, happens: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch_tasks()
    scene, wrong = SCENES[name], list[str]()
    async with scene.fleet() as fleet:
        known = [(view.configured, view.worker) for view in fleet.proxy.state.registry.views()]
        for number in count(1):
            talk = await scene.talk(fleet, number, stream=True)
            ended = turns_ended(fleet)
            async with scene.set(fleet):
                asked = scene.ask(fleet, talk, stream=True)
                _, where = await struck(asked, number, Moment.DUE, partial(STRIKES[happens], fleet))
            for configured, worker in known:
                assert configured is not None
                fleet.proxy.state.registry.add_static(configured, fleet.proxy.state.now())
                fleet.proxy.state.registry.probed(worker.id, worker, None, fleet.proxy.state.now())
            await fleet.until(lambda: at_rest(fleet), 10)
            found = [*of_proxy(fleet), *errors(caplog)]
            if turns_ended(fleet) - ended - scene.is_queued != 1:
                found.append("not one turn in the metrics")
            wrong += [f"{number} {where}: {one}" for one in found]
            if not where:
                break
            fleet.forgive()
            await goes_on(fleet, scene, talk, stream=True)
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
