"""The data path's canary, without a network: which pairs it tries, and whom it holds what it found against."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest

from ppd.proxy.assembly import assemble, make_canary
from ppd.proxy.config import ProxyConfig
from ppd.proxy.failures import Cause
from ppd.proxy.fleet.worker import Role, Worker, WorkerId
from ppd.proxy.health.canary import PAIRS_A_ROUND, TRIALS_A_ROUND, Trial, possible_trial
from ppd.proxy.health.circuit_breaker import PROBE_LIMIT_S
from ppd.proxy.settings import Settings
from ppd.proxy.upstream.call import Call, Expiry
from ppd.proxy.upstream.client import Upstream

INTERVAL_S = 30.0
PARAMS = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "remote_block_ids": [[1, 2]],
    "tp_size": 1,
}
HANDOFF = msgspec.json.encode({"kv_transfer_params": PARAMS})
PLAIN = b"{}"

# What a worker answers: a body, a status, or the cause of there being no answer.
Script = Callable[[str, bool], bytes | int | Cause]


class FakeAnswer:
    def __init__(self, found: bytes | int) -> None:
        self.status = found if isinstance(found, int) else 200
        self.retry_after_s = 7.0
        self._body = b"" if isinstance(found, int) else found

    async def body(self) -> bytes:
        return self._body


class FakeUpstream:
    """Answers by a script, from the worker's address and whether the leg pulls KV."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked: list[tuple[str, bool]] = []

    def uptime(self) -> float:
        return 50.0

    @asynccontextmanager
    async def answer(self, call: Call, path: str, **ask: Any) -> AsyncIterator[FakeAnswer]:
        pulls = b"remote_block_ids" in ask["body"] and b"do_remote_decode" not in ask["body"]
        self.asked.append((call.worker.id, pulls))
        found = self.script(call.worker.id, pulls)
        if isinstance(found, Cause):
            raise call.error("as ordered", found)
        if pulls:
            assert call.expiry == Expiry.of(self.uptime(), ProxyConfig().handoff_max_age_s)
        yield FakeAnswer(found)


class Bench:
    """A canary, its clock, and the proxy's state."""

    def __init__(self, script: Script, interval_s: float = INTERVAL_S) -> None:
        self.now_s = 1000.0
        config = ProxyConfig(canary_interval_s=interval_s, breaker_open_s=5.0, breaker_failures=1)
        proxy = assemble(Settings(config), now=lambda: self.now_s)
        proxy.listener.close()
        self.state = proxy.state
        self.upstream = FakeUpstream(script)
        self.canary = make_canary(config, self.state, cast(Upstream, self.upstream))
        for address in ("p1:1", "p2:1", "d1:1"):
            self.add(address)

    def add(self, address: str, **members: Any) -> None:
        worker = Worker(role=Role(address[0].upper()), address=address, **{"models": ("m",), **members})
        self.state.registry.add_static(worker, self.now_s)
        self.state.registry.probed(worker.id, worker, None, self.now_s)

    def due(self) -> list[tuple[str, str]]:
        return [trial.pair for trial in self.canary._due()]

    def trial(self, prefill: str = "p1:1") -> Trial:
        found = self.trial_of(prefill, "d1:1")
        assert found is not None
        return found

    def trial_of(self, *pair: str) -> Trial | None:
        prefill, decode = (self.state.registry.view(WorkerId(address)) for address in pair)
        assert prefill is not None and decode is not None
        return possible_trial(prefill, decode)

    def states(self) -> dict[Any, str]:
        return dict(self.state.health.breakers.states(self.now_s))

    def passed_over(self) -> set[Any]:
        return set(self.canary.passed_over(self.now_s))


def script(prefill: bytes | int | Cause, pulling: bytes | int | Cause, plain: bytes | int | Cause = PLAIN) -> Script:
    return lambda worker, pulls: prefill if worker.startswith("p") else pulling if pulls else plain


P1, D1 = WorkerId("p1:1"), WorkerId("d1:1")
PAIR = (P1, D1)
GOOD = script(HANDOFF, PLAIN)


@pytest.mark.parametrize(
    ("script", "result", "opened", "pinned"),
    [
        (GOOD, "ok", set(), 0),
        (script(500, PLAIN), "prefill_failed", {P1}, 0),
        (script(Cause.TIMEOUT, PLAIN), "prefill_failed", {P1}, 0),
        (script(503, PLAIN), "overloaded", set(), 0),
        (script(PLAIN, PLAIN), "no_handoff", set(), 0),
        (script(HANDOFF, 500), "wedged", {PAIR}, 1),
        (script(HANDOFF, Cause.TIMEOUT), "wedged", {PAIR}, 1),
        (script(HANDOFF, 429), "overloaded", set(), 1),
        (script(HANDOFF, Cause.STALE_HANDOFF), "stale_handoff", set(), 1),
        (script(HANDOFF, 500, 500), "local_failed", {D1}, 1),
        (script(HANDOFF, Cause.TIMEOUT, Cause.TIMEOUT), "local_failed", {D1}, 1),
        (script(HANDOFF, 500, 503), "overloaded", set(), 1),
    ],
)
async def test_a_failure_is_held_against_whom_the_control_shows(
    script: Script, result: str, opened: set[Any], pinned: int
) -> None:
    bench = Bench(script)
    assert await bench.canary.run_trial(bench.trial()) == result
    assert set(bench.states()) == opened
    assert all(not view.inflight for view in bench.state.registry.views())
    assert bench.state.handoffs.outstanding(bench.now_s) == pinned


async def test_an_overloaded_worker_is_left_alone_for_as_long_as_it_says() -> None:
    bench = Bench(script(HANDOFF, 429))
    await bench.canary.run_trial(bench.trial())
    assert bench.passed_over() == {D1}
    bench.now_s += 6.9
    assert bench.passed_over() == {D1}
    bench.now_s += 0.2
    assert bench.passed_over() == set()


def test_a_new_pair_is_due_after_an_interval_and_one_that_turns_have_used_later() -> None:
    bench = Bench(GOOD)
    assert bench.due() == []
    bench.now_s += INTERVAL_S / 2
    bench.state.health.succeeded(PAIR)
    bench.now_s += INTERVAL_S / 2
    assert bench.due() == [("p2:1", "d1:1")]
    bench.now_s += INTERVAL_S / 2
    assert set(bench.due()) == {("p1:1", "d1:1"), ("p2:1", "d1:1")}


async def test_a_pair_that_was_tried_is_due_an_interval_later() -> None:
    bench = Bench(script(PLAIN, PLAIN))
    bench.due()
    bench.now_s += INTERVAL_S
    for trial in bench.canary._due():
        await bench.canary.run_trial(trial)
    assert bench.due() == []
    bench.now_s += INTERVAL_S
    assert len(bench.due()) == 2


def test_a_pair_of_which_one_takes_the_other_for_a_third_gets_no_canary_and_no_turn() -> None:
    bench = Bench(GOOD)
    coordinates = {"engine_id": "one"}
    bench.add("p3:1", connector="nixl_push", coordinates=coordinates, incarnation="1.5")
    bench.add("d3:1", connector="nixl_push")
    strange = ("p3:1", "d3:1")
    bench.now_s += INTERVAL_S
    assert strange in bench.due()
    bench.add("p3:1", connector="nixl_push", coordinates=coordinates, incarnation="2.5")
    bench.now_s += INTERVAL_S
    assert strange not in bench.due()
    assert bench.passed_over() == {strange}
    bench.state.health.breakers.failed(P1, bench.now_s, began_s=bench.now_s, at_once=True)
    assert bench.passed_over() == {strange, P1}


@pytest.mark.parametrize("again", ["p1:1", "d1:1"])
async def test_a_worker_that_begins_anew_during_its_trial_gets_no_blame_for_the_one_before(again: str) -> None:
    bench = Bench(GOOD)

    def begins_anew(worker: str, pulls: bool) -> bytes | Cause:
        if pulls:
            bench.now_s += 1.0
            bench.add(again, incarnation="2.0")
            return Cause.RESET
        return script(HANDOFF, PLAIN)(worker, pulls)  # type: ignore[return-value]

    bench.upstream.script = begins_anew
    await bench.canary.run_trial(bench.trial())
    assert (bench.states(), bench.passed_over()) == ({}, set())


async def test_a_wedged_pair_is_tried_by_canaries_alone_until_one_comes_through() -> None:
    bench = Bench(script(HANDOFF, 500))
    bench.due()
    await bench.canary.run_trial(bench.trial())
    assert bench.passed_over() == {PAIR}
    assert PAIR not in bench.due()
    bench.now_s += 5.1
    assert bench.states() == {PAIR: "half_open"}
    assert bench.passed_over() == {PAIR}, "no turn tries it"
    assert bench.due() == [PAIR], "it is due at once"
    assert await bench.canary.run_trial(bench.trial()) == "wedged"
    bench.now_s += 5.1
    assert bench.states() == {PAIR: "open"}, "for twice as long"
    bench.now_s += 5.0
    bench.upstream.script = GOOD
    assert await bench.canary.run_trial(bench.trial()) == "ok"
    assert (bench.states(), bench.passed_over()) == ({}, set())


async def test_a_pair_that_no_canary_can_try_is_left_to_turns() -> None:
    bench = Bench(GOOD)
    bench.add("d1:1", models=("m",), connector="p2p_nccl")
    bench.due()
    assert bench.due() == []
    bench.state.health.breakers.failed(PAIR, bench.now_s, began_s=bench.now_s, at_once=True)
    assert bench.passed_over() == {PAIR}
    bench.now_s += 5.1
    assert bench.states() == {PAIR: "half_open"}
    assert bench.passed_over() == set()


async def test_a_pair_whose_legs_cannot_be_made_is_not_tried() -> None:
    bench = Bench(GOOD)
    for address in ("p1:1", "d1:1"):
        bench.add(address, connector="p2p_nccl")  # and no address for its KV
    bench.due()
    bench.state.health.breakers.failed(PAIR, bench.now_s, began_s=bench.now_s, at_once=True)
    bench.now_s += 5.1
    assert bench.due() == []
    assert bench.passed_over() == set(), "no canary could close its breaker"


@pytest.mark.parametrize(
    ("script", "result", "is_left"),
    [
        (script(401, PLAIN), "prefill_failed", True),  # the workers want the client's own key
        (script(HANDOFF, 403, 403), "local_failed", True),
        (script(PLAIN, PLAIN), "no_handoff", True),
        (script(HANDOFF, 500), "wedged", False),
        (script(503, PLAIN), "overloaded", False),
    ],
)
async def test_a_pair_that_a_canary_could_not_judge_is_left_to_turns_until_one_can(
    script: Script, result: str, is_left: bool
) -> None:
    bench = Bench(GOOD)
    bench.due()
    bench.state.health.breakers.failed(PAIR, bench.now_s, began_s=bench.now_s, at_once=True)
    bench.now_s += 5.1
    assert bench.passed_over() == {PAIR}
    bench.upstream.script = script
    assert await bench.canary.run_trial(bench.trial()) == result
    bench.now_s += 20.0  # the time that a wedged pair or an overloaded worker is passed over is gone
    assert bench.states() == {PAIR: "half_open"}
    assert (PAIR not in bench.passed_over()) is is_left
    bench.upstream.script = lambda worker, pulls: 500 if pulls else HANDOFF
    assert await bench.canary.run_trial(bench.trial()) == "wedged"
    bench.now_s += 40.0
    assert PAIR in bench.passed_over()


@pytest.mark.parametrize("key", [P1, D1])
async def test_a_half_open_worker_has_the_canary_as_its_one_probe(key: WorkerId) -> None:
    seen: list[set[Any]] = []

    def looking(worker: str, pulls: bool) -> bytes | int | Cause:
        seen.append(bench.passed_over())
        return GOOD(worker, pulls)

    bench = Bench(looking)
    bench.state.health.breakers.failed(key, bench.now_s, began_s=bench.now_s, at_once=True)
    bench.now_s += 5.1
    assert bench.passed_over() == set()
    assert await bench.canary.run_trial(bench.trial()) == "ok"
    assert key in seen[0]
    assert bench.states() == {}


@pytest.mark.parametrize(("script", "result"), [(script(503, PLAIN), "overloaded"), (script(PLAIN, 0), "no_handoff")])
async def test_what_a_canary_did_not_find_out_may_be_tried_by_others(script: Script, result: str) -> None:
    bench = Bench(script)
    bench.state.health.breakers.failed(D1, bench.now_s, began_s=bench.now_s, at_once=True)
    bench.now_s += 5.1
    assert await bench.canary.run_trial(bench.trial()) == result
    assert bench.states() == {D1: "half_open"}
    assert D1 not in bench.passed_over()


def test_a_half_open_worker_that_another_leg_probes_is_not_disturbed() -> None:
    bench = Bench(GOOD)
    bench.due()
    bench.now_s += INTERVAL_S
    bench.state.health.breakers.failed(P1, bench.now_s, began_s=bench.now_s, at_once=True)
    bench.now_s += 5.1
    bench.state.health.breakers.began(P1, bench.now_s)
    assert bench.due() == [("p2:1", "d1:1")]
    bench.now_s += PROBE_LIMIT_S
    assert len(bench.due()) == 2


@pytest.mark.parametrize(
    "members", [{"models": ("other",)}, {"models": ()}, {"connector": "none"}, {"engine_version": "2"}], ids=str
)
def test_only_what_can_hand_over_is_a_pair(members: dict[str, Any]) -> None:
    bench = Bench(GOOD)
    bench.add("p1:1", engine_version="1")
    bench.add("d9:1", **{"engine_version": "1", **members})
    assert bench.trial_of("p1:1", "d9:1") is None
    assert bench.trial_of("p1:1", "d1:1") is not None


@pytest.mark.parametrize("now_s", [1000.0, 36000.7, 37955.832205778, 2.0**20 + 0.1, 1e9 + 1 / 3])
async def test_a_half_open_pair_is_due_at_once_whatever_the_clock_says(now_s: float) -> None:
    """The clock is a float: a difference of large numbers is not always the number it was made with."""
    bench = Bench(script(HANDOFF, 500))
    bench.canary._interval_s = 0.2
    for step in range(50):
        bench.now_s = now_s + step * 0.37
        assert await bench.canary.run_trial(bench.trial()) == "wedged"
        bench.now_s += 200.0  # longer than any breaker stays open
        assert bench.states() == {PAIR: "half_open"}
        assert PAIR in bench.due()


def test_with_many_pairs_a_round_is_bounded_and_all_have_their_turn() -> None:
    bench = Bench(GOOD)
    for number in range(2, 52):
        bench.add(f"p{number}:1")
        bench.add(f"d{number}:1")
    assert 2 * PAIRS_A_ROUND < 51 * 51
    bench.now_s += INTERVAL_S
    wedged = (WorkerId("p40:1"), WorkerId("d40:1"))
    bench.state.health.breakers.failed(wedged, bench.now_s, began_s=bench.now_s, at_once=True)
    bench.now_s += 5.1
    rounds = [bench.due() for _ in range(3)]
    assert [due[0] for due in rounds] == [wedged] * 3, "turns wait for this one"
    assert {len(due) for due in rounds} == {TRIALS_A_ROUND}
    tried = set[Any]()
    for _ in range(51 * 51 // (TRIALS_A_ROUND - 1) + 3):
        due = bench.due()
        tried.update(due)
        for pair in due:
            bench.canary._tried_s[pair] = bench.now_s  # type: ignore[index]
    assert len(tried) == 51 * 51


@pytest.mark.parametrize(
    ("prefill", "decode", "result", "opened"),
    [
        (PLAIN, PLAIN, "ok", set()),
        (500, Cause.TIMEOUT, "prefill_failed", {P1}),
        (PLAIN, 500, "wedged", {PAIR}),
        (PLAIN, 503, "overloaded", set()),
    ],
)
async def test_legs_that_run_at_once_are_tried_at_once(
    prefill: bytes | int | Cause, decode: bytes | int | Cause, result: str, opened: set[Any]
) -> None:
    """A D that answers nothing without a P has no control: what fails there is the pair's."""
    bench = Bench(script(prefill, decode, decode))
    for address in ("p1:1", "d1:1"):
        bench.add(address, connector="sglang")
    assert await bench.canary.run_trial(bench.trial()) == result
    assert {key for key, state in bench.states().items() if state == "open"} == opened
    assert sorted(bench.upstream.asked) == [("d1:1", False), ("p1:1", False)]


def test_a_d_behind_a_sidecar_gets_no_canary() -> None:
    """It would let no handoff through, so that D would pass whatever the pair does."""
    bench = Bench(GOOD)
    bench.add("d2:1", has_sidecar=True)
    assert bench.trial_of("p1:1", "d1:1") is not None
    assert bench.trial_of("p1:1", "d2:1") is None
