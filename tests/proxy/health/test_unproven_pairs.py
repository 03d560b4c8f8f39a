"""Pairs of NIXL push whose D may know another P than the one that is there: a canary goes over them before turns."""

from __future__ import annotations

import pytest

from tests.proxy.health.test_canary import D1, HANDOFF, INTERVAL_S, PAIR, PLAIN, Bench


def push(interval_s: float = INTERVAL_S, says: bytes | int = PLAIN, models: tuple[str, ...] = ("m",)) -> Bench:
    bench = Bench(lambda worker, _: says if worker == D1 else HANDOFF, interval_s)
    bench.add("d1:1", connector="nixl_push", incarnation="1.0")
    told = {"engine_id": "one"}
    bench.add("p1:1", connector="nixl_push", incarnation="99.0", coordinates=told, models=models)
    return bench


async def test_an_unproven_pair_has_a_canary_at_once_and_no_turn_before() -> None:
    bench = push()
    assert (bench.passed_over(), bench.due()) == ({PAIR}, [PAIR])
    assert await bench.canary.run_trial(bench.trial()) == "ok"
    assert (bench.passed_over(), bench.due()) == (set(), [])


@pytest.mark.parametrize(("says", "result"), [(500, "local_failed"), (429, "overloaded")])
async def test_one_that_was_not_proven_is_tried_again_or_left_to_its_breaker(says: int, result: str) -> None:
    bench = push(says=says)
    assert await bench.canary.run_trial(bench.trial()) == result
    assert PAIR in bench.passed_over() if result == "overloaded" else bench.states() == {D1: "open"}


async def test_a_turn_that_moves_kv_proves_its_pair() -> None:
    bench = push()
    bench.state.health.succeeded(PAIR)
    assert (bench.passed_over(), bench.due()) == (set(), [])


async def test_without_canaries_no_pair_waits_for_one() -> None:
    assert push(interval_s=0.0).passed_over() == set()


async def test_an_unproven_pair_that_no_canary_can_try_is_left_to_turns() -> None:
    bench = push(models=("another",))
    assert (bench.due(), bench.passed_over()) == ([], set())
