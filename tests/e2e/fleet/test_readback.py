"""P reads a session's KV back from D, and D gets what is new: the right text comes, whatever fails meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from ppd.proxy.config import Mode
from ppd.proxy.policy import Route
from ppd.servers.sim.core.config import LoadFailurePolicy
from ppd.servers.sim.core.counters import Trap
from ppd.servers.sim.core.fault_orders import FaultKind, FaultLeg, FaultPhase, Faults
from ppd.servers.sim.engine.engine import SimEngine
from tests.e2e.failures.fleet import HASTY, FaultFleet, Seen, Talk, order
from tests.support.proxy import ADMIN_KEY

HISTORY = "A long history that is dear to compute again. " * 40
BOTH = {"bidirectional_kv_xfer": True}
TOLD = ",bidirectional_kv_xfer=true"
NEW = "And then?"


@dataclass
class Kept:
    """A conversation whose first turn went over P and D, which keeps its KV."""

    fleet: FaultFleet
    talk: Talk
    stream: bool

    @classmethod
    @asynccontextmanager
    async def on(
        cls, names: str = "P1 D1", *, stream: bool = True, options: str = TOLD, engine: Any = BOTH, **settings: Any
    ) -> AsyncIterator[Kept]:
        async with FaultFleet.of("", **settings) as fleet:
            for name in names.split():
                await fleet.add(name, options=options, **engine)
            it = cls(fleet, Talk([{"role": "user", "content": HISTORY}]), stream)
            await it.say(Route.SPLIT)
            yield it
            for each in fleet.engines.values():
                each.faults = Faults()  # what hangs may end
            await fleet.until(fleet.at_rest)

    @property
    def p(self) -> SimEngine:
        return self.fleet.engines["P1"]

    @property
    def d(self) -> SimEngine:
        return self.fleet.engines["D1"]

    async def say(self, forced: Route | None = Route.READBACK, **changes: Any) -> Seen:
        """The next turn, whose text is right."""
        body = self.talk.body(stream=self.stream, **changes)
        seen = await self.fleet.ask(body, forced=forced)
        assert seen.is_complete, (seen.status, seen.body)
        assert seen.text == await self.fleet.right_text(body)
        assert b"token_ids" not in seen.body.replace(b'"token_ids":null', b"").replace(b'"prompt_token_ids":null', b"")
        assert b"remote_" not in seen.body
        self.talk.heard(seen.text, NEW)
        return seen

    def legs(self) -> list[str]:
        return [" ".join(filter(None, (leg.kind, leg.error or ""))) for leg in self.fleet.newest().legs]

    def handles(self) -> int:
        return len(self.fleet.proxy.state.handles)


@pytest.mark.parametrize("stream", [True, False])
async def test_turn_after_turn_p_computes_only_what_is_new(stream: bool) -> None:
    async with Kept.on(stream=stream) as it:
        for _ in range(3):
            assert (it.handles(), it.d.pinned) == (1, 1)
            before = it.p.counters.external_kv_tokens, it.p.counters.local_compute_tokens
            known = it.fleet.newest()
            held = (known.prompt_tokens or 0) + (known.completion_tokens or 0)
            seen = await it.say()
            assert (seen.headers["X-PPD-Route"], seen.headers["X-PPD-Reason"]) == ("READBACK", "forced")
            assert it.legs() == ["prefill", "decode"]
            receipt = it.fleet.newest()
            assert it.p.counters.external_kv_tokens - before[0] == held - 1
            assert it.p.counters.local_compute_tokens - before[1] == (receipt.prompt_tokens or 0) - held + 1
            assert receipt.cached_tokens == held - 1
        assert not it.p.counters.traps
        assert not it.d.counters.traps
        assert it.d.pinned == 1


async def test_nothing_is_asked_of_workers_that_do_not_say_that_they_can() -> None:
    async with Kept.on(options="") as it:
        seen = await it.say()
        assert (seen.headers["X-PPD-Route"], seen.headers["X-PPD-Reason"]) == ("SPLIT", "no_handle")
        assert it.handles() == 0
        assert not any(b"return_token_ids" in one.body for one in it.d.received)


READ, PULL, HEAD = FaultLeg.PREFILL, FaultLeg.DECODE, FaultPhase.HEAD
Spoil = Callable[[Kept], None]


def p(faults: Faults) -> Spoil:
    def spoil(it: Kept) -> None:
        it.p.faults = faults

    return spoil


def d(faults: Faults) -> Spoil:
    def spoil(it: Kept) -> None:
        it.d.faults = faults

    return spoil


def given_up(it: Kept) -> None:
    """D's time is over by its own clock; the proxy's is late."""
    it.fleet.clock.advance(476.0)


def stood_still(it: Kept) -> None:
    """The proxy's loop, from before P's leg to after it."""
    it.fleet.uptime.leaps_s = [0.0, 0.0, 500.0]


@pytest.mark.parametrize(
    ("spoil", "legs", "missing"),
    [
        pytest.param(p(order(FaultKind.ERROR, READ)), "prefill 5xx, decode", "handle_refused", id="P fails"),
        pytest.param(
            p(order(FaultKind.ERROR, READ, status=400)), "prefill 4xx, decode", "handle_refused", id="P refuses it"
        ),
        pytest.param(p(order(FaultKind.LOAD, READ)), "prefill 5xx, decode", "handle_refused", id="the load fails"),
        pytest.param(p(order(FaultKind.HANDOFF, READ)), "prefill, decode", "params_missing", id="P hands nothing over"),
        pytest.param(p(order(FaultKind.RESET, READ, HEAD)), "prefill reset, local", None, id="P ends the connection"),
        pytest.param(p(order(FaultKind.HANG, READ)), "prefill timeout, local", None, id="P hangs"),
        pytest.param(p(order(FaultKind.ERROR, READ, status=503)), "prefill overloaded, local", None, id="P is full"),
        pytest.param(d(order(FaultKind.ERROR, PULL)), "prefill, decode 5xx, local", None, id="D fails"),
        pytest.param(given_up, "prefill 5xx, decode", "handle_refused", id="D gives it up first"),
        pytest.param(stood_still, "prefill, decode", "handle_expired", id="the proxy stood still"),
    ],
)
async def test_what_fails_costs_time_but_no_turn_and_no_handle_is_used_twice(
    spoil: Spoil, legs: str, missing: str | None
) -> None:
    engine = {**BOTH, "load_failure_policy": LoadFailurePolicy.FAIL}
    async with Kept.on(engine=engine, **HASTY) as it:
        spoil(it)
        await it.say()
        assert (", ".join(it.legs()), it.fleet.newest().handoff_missing) == (legs, missing)
        assert it.handles() == 0, "it was used, and D has given no other"
        await it.say()
        assert it.fleet.newest().vetoes[0] == "no_handle"
        it.fleet.uptime.leaps_s = []
        assert not it.d.counters.traps
        assert not it.p.counters.traps


async def test_a_p_that_is_to_compute_what_d_has_given_up_costs_a_time_out() -> None:
    """As it waits for that KV for ever, like vLLM's."""
    async with Kept.on(engine={**BOTH, "load_failure_policy": LoadFailurePolicy.RECOMPUTE}, **HASTY) as it:
        given_up(it)
        await it.say()
        assert it.legs() == ["prefill timeout", "local"]
        assert it.p.counters.traps == {Trap.READ_AGAIN: 1}
        it.p.counters.traps.clear()


async def test_kv_of_another_conversation_reaches_no_answer_and_no_cache_that_others_use() -> None:
    """As if the proxy or an engine had mixed up two handles: P's own tokens of the prompt do not begin with these."""
    async with Kept.on() as it:
        fleet, other = (
            it.fleet,
            Kept(it.fleet, Talk([{"role": "user", "content": HISTORY.replace("long", "lone")}]), True),
        )
        await other.say(Route.SPLIT)
        handles = fleet.proxy.state.handles
        ours, theirs = handles.kept
        handles.kept[ours], handles.kept[theirs] = handles.kept[theirs], handles.kept[ours]
        read = it.p.counters.external_kv_tokens
        await it.say()
        assert it.p.counters.external_kv_tokens > read, "P has read the other's KV"
        assert (it.legs(), fleet.newest().handoff_missing) == (["prefill", "decode"], "not_a_prefix")
        assert await fleet.metric('ppd_handoffs_missing_total{reason="not_a_prefix"}') == 1
        for talk in (it, other):
            seen = await talk.say(Route.SPLIT)
            assert seen.headers["X-PPD-Route"] == "SPLIT"


async def test_a_handle_ends_with_its_time_its_d_and_its_session() -> None:
    async with Kept.on("P1 D1 D2") as it:
        fleet, handles = it.fleet, it.fleet.proxy.state.handles
        fleet.uptime.leaps_s = [460.0]
        assert (await it.say()).headers["X-PPD-Reason"] == "no_handle"
        assert it.handles() == 1, "that turn has given a new one"
        home = fleet.newest().decode
        await fleet.restart(home)
        assert (await it.say()).headers["X-PPD-Reason"] == "no_handle"
        assert it.handles() == 1
        home = fleet.newest().decode
        await fleet.admin("PATCH", f"/workers/{home}", {"draining": True})
        seen = await it.say()
        assert (seen.headers["X-PPD-Decode"] != home, seen.headers["X-PPD-Reason"]) == (True, "decode_draining")
        (handle,) = handles.kept.values()
        assert handle.decode == fleet.worker(seen.headers["X-PPD-Decode"])


async def test_two_turns_at_once_use_one_handle_once() -> None:
    async with Kept.on(stream=False) as it:
        body = it.talk.body()
        seen = await asyncio.gather(*(it.fleet.ask(body, forced=Route.READBACK) for _ in range(2)))
        assert sorted(one.headers["X-PPD-Reason"] for one in seen) == ["forced", "no_handle"]
        assert {one.text for one in seen} == {await it.fleet.right_text(body)}
        assert not it.d.counters.traps


@pytest.mark.parametrize("edit", ["of the answer", "of the beginning", "of the newest"])
async def test_an_edited_history_is_not_read_back(edit: str) -> None:
    async with Kept.on() as it:
        place = {"of the beginning": 0, "of the answer": 1, "of the newest": 2}[edit]
        it.talk.messages[place]["content"] += " in other words"
        seen = await it.say()
        expected = "READBACK" if edit == "of the newest" else "SPLIT"
        assert seen.headers["X-PPD-Route"] == expected
        assert it.fleet.newest().handoff_missing is None


async def test_a_session_that_has_gone_on_from_less_is_not_read_back() -> None:
    """As of clients that send the message before with other words. Three such would bar the model for ten minutes."""
    async with Kept.on() as it:
        await it.say()
        it.talk.messages[2]["content"] += " Be brief."
        await it.say(Route.LOCAL)
        await it.say()
        assert (it.fleet.newest().vetoes, it.fleet.newest().handoff_missing) == (("no_handle",), None)


@pytest.mark.parametrize("moment", ["P reads", "P has answered", "D answers"])
async def test_a_client_that_leaves_leaves_only_what_d_keeps(moment: str) -> None:
    async with Kept.on() as it:
        fleet, seen, handed = it.fleet, Seen(), it.p.counters.handoffs
        if moment == "P reads":
            it.p.faults = order(FaultKind.HANG, READ)
        elif moment == "P has answered":
            it.d.faults = order(FaultKind.HANG, PULL)
        body = it.talk.body(stream=True, max_tokens=4000, ignore_eos=True)
        asking = asyncio.create_task(fleet.ask(body, seen, Route.READBACK))
        whens: dict[str, Callable[[], bool]] = {
            "P reads": lambda: not it.p.faults.orders[0].times,
            "P has answered": lambda: it.p.counters.handoffs > handed,
            "D answers": lambda: bool(seen.text) if seen.is_stream else False,
        }
        await fleet.until(whens[moment])
        asking.cancel()
        await asyncio.wait({asking})
        await fleet.until(lambda: not any(each.scheduler.sequences for each in fleet.engines.values()))
        assert it.handles() == 0
        assert it.d.pinned <= 1, "what P did not come to read"
    fleet.end_leases()
    fleet.clock.advance(480.0)
    it.d.handoffs.expire()
    assert fleet.idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_d_that_takes_what_a_client_left_does_not_keep_it(stream: bool) -> None:
    """It would do so for minutes, where P frees it within seconds."""
    async with Kept.on("P1 D1 D2") as it:
        fleet = it.fleet
        it.p.faults = order(FaultKind.SLOW, READ, HEAD, delay_s=0.03)
        kept = {engine.address: engine.counters.kept_answers for engine in fleet.engines.values()}
        asking = asyncio.create_task(fleet.ask(Talk(it.talk.messages[:1]).body(stream=stream), forced=Route.SPLIT))
        handed = it.p.counters.handoffs
        await fleet.until(lambda: it.p.counters.handoffs > handed)
        asking.cancel()
        await asyncio.wait({asking})
        await fleet.until(lambda: not fleet.is_winding_up() and fleet.at_rest())
        assert await fleet.metric('ppd_handovers_abandoned_total{fate="taken"}') == 1
        assert (it.p.pinned, fleet.outstanding()) == (0, 0)
        assert {engine.address: engine.counters.kept_answers for engine in fleet.engines.values()} == kept


@pytest.mark.parametrize("dies", ["P1", "D1"])
async def test_a_worker_that_dies_costs_a_prefill(dies: str) -> None:
    async with Kept.on("P1 P2 D1 D2") as it:
        fleet = it.fleet
        home = fleet.newest().decode
        dying = home if dies == "D1" else "P1"
        fleet.engines[dying].kill()
        if dies == "P1":
            fleet.engines["P2"].faults = order(FaultKind.ERROR, READ, status=503)
        await it.say()
        assert fleet.newest().decode != (home if dies == "D1" else "")
        await it.say(None)


async def test_modes_that_predict_judge_it_and_say_so() -> None:
    async with Kept.on(mode=Mode.SLO, profile="h100-llama-3.1-8b") as it:
        await it.say(None)
        candidates = it.fleet.newest().candidates
        assert candidates is not None
        at = candidates.route.index("READBACK")
        assert candidates.source[at] == candidates.decode[at] == "D1"
        assert candidates.fetched_tokens[at] > 1800
        assert (candidates.ttft_s[at] or 0.0) > 0.0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_raw_prompt_is_read_back_too(stream: bool) -> None:
    async with Kept.on() as it:
        fleet, prompt, routes = it.fleet, HISTORY, list[str]()
        for forced in (Route.SPLIT, Route.READBACK, Route.READBACK):
            body = {"model": "sim", "prompt": prompt, "max_tokens": 10, "temperature": 0, "stream": stream}
            headers = {"X-Admin-Key": ADMIN_KEY, "X-PPD-Force-Route": forced}
            async with fleet.session.post(f"{fleet.base_url}/v1/completions", json=body, headers=headers) as answer:
                raw = await answer.read()
            assert b"token_ids" not in raw.replace(b'"token_ids":null', b"").replace(b'"prompt_token_ids":null', b"")
            alone = {**body, "stream": False}
            async with fleet.session.post(
                f"http://{fleet.engines['reference'].address}/v1/completions", json=alone
            ) as right:
                text = (await right.json())["choices"][0]["text"]
            seen = Seen(200, answer.headers, raw)
            events = [event for event in seen.events if isinstance(event, dict)] if stream else [seen.json]
            assert "".join(choice["text"] for event in events for choice in event["choices"]) == text
            routes.append(answer.headers["X-PPD-Route"])
            prompt += f"{text} And then? "
        assert routes == ["SPLIT", "READBACK", "READBACK"]
        assert not it.d.counters.traps


async def test_a_handle_that_ends_between_decision_and_leg_leaves_a_split() -> None:
    async with Kept.on() as it:
        it.fleet.uptime.leaps_s = [0.0, 460.0]
        seen = await it.say()
        assert (seen.headers["X-PPD-Route"], it.legs()) == ("READBACK", ["prefill", "decode"])
        assert it.p.counters.external_kv_tokens == 0
        assert it.handles() == 1, "it has given a new one"


@pytest.mark.parametrize("kind", [FaultKind.RESET, FaultKind.ABORT, FaultKind.ERROR])
async def test_an_answer_that_breaks_off_leaves_no_handle(kind: FaultKind) -> None:
    async with Kept.on() as it:
        it.d.faults = order(kind, PULL, FaultPhase.EVENTS, after_events=3)
        seen = await it.fleet.ask(it.talk.body(stream=True), forced=Route.READBACK)
        assert seen.status == 200
        assert it.handles() == 0
        await it.say()
        assert it.fleet.newest().vetoes == ("no_handle",)


async def test_a_p_that_only_says_that_it_can_costs_a_time_out() -> None:
    async with FaultFleet.of("", **HASTY) as fleet:
        await fleet.add("P1", options=TOLD)
        await fleet.add("D1", options=TOLD, **BOTH)
        it = Kept(fleet, Talk([{"role": "user", "content": HISTORY}]), True)
        await it.say(Route.SPLIT)
        await it.say()
        assert it.legs() == ["prefill timeout", "local"]
        assert it.p.counters.traps == {Trap.NOT_BIDIRECTIONAL: 1}
        it.p.counters.traps.clear()
        await fleet.until(fleet.at_rest)
