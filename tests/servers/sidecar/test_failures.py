"""What follows when P, the handoff or the engine fails, or the client leaves."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from typing import Any

import pytest

from ppd.proxy.errors import ConfigError
from ppd.servers.sidecar.failed_legs import PAUSE_S, FailurePolicy, OnFailure
from ppd.servers.sim.core.fault_orders import FaultKind, FaultLeg, Faults, Order
from tests.servers.sidecar.site import CHAT, Site

pytestmark = pytest.mark.slow

DECODE, ERROR, RETRY = FailurePolicy(), FailurePolicy(OnFailure.ERROR), FailurePolicy(OnFailure.RETRY, 2)


def refusing(status: int, times: int = 100) -> Faults:
    return Faults(refuse=times, refuse_status=status)


class Pauses:
    """In place of sleep: they take no time, and are kept."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    async def __call__(self, pause_s: float) -> None:
        self.taken.append(pause_s)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "fault", "status", "reason", "asked_p", "asked_d"),
    [
        (DECODE, refusing(500), 200, "prefill_failed", 1, 1),
        (DECODE, refusing(503), 200, "prefill_failed", 1, 1),
        (DECODE, Faults(garbage=1), 200, "prefill_failed", 1, 1),
        (DECODE, Faults(orders=[Order(FaultKind.RESET)]), 200, "prefill_failed", 1, 1),
        (DECODE, refusing(422), 422, "prefill_named", 1, 0),
        (ERROR, refusing(500), 500, "prefill_named", 1, 0),
        (ERROR, refusing(503), 503, "prefill_named", 1, 0),
        (ERROR, refusing(429), 429, "prefill_named", 1, 0),
        (ERROR, Faults(garbage=1), 502, "prefill_named", 1, 0),
        (ERROR, Faults(orders=[Order(FaultKind.PAGE, status=504)]), 504, "prefill_named", 1, 0),
        (RETRY, refusing(503, 1), 200, "prefill_named", 2, 1),
        (RETRY, refusing(502, 2), 200, "prefill_named", 3, 1),
        (RETRY, refusing(504), 504, "prefill_named", 3, 0),
        (RETRY, refusing(500), 500, "prefill_named", 1, 0),
        (RETRY, refusing(422), 422, "prefill_named", 1, 0),
        (RETRY, Faults(garbage=1), 502, "prefill_named", 1, 0),
        (RETRY, Faults(orders=[Order(FaultKind.RESET, times=1)]), 200, "prefill_named", 2, 1),
        (RETRY, Faults(orders=[Order(FaultKind.RESET, times=9)]), 502, "prefill_named", 3, 0),
        (RETRY, refusing(408), 502, "prefill_named", 1, 0),
    ],
)
async def test_when_p_fails_the_operators_choice_follows(
    policy: FailurePolicy, fault: Faults, status: int, reason: str, asked_p: int, asked_d: int
) -> None:
    pauses = Pauses()
    async with Site.of(policy=policy, pause=pauses) as site:
        site.engines["P1"].faults = deepcopy(fault)  # it counts down
        answer = await site.ask(site.to_p, stream=True)
        assert (answer.status, answer.headers["X-PPD-Reason"]) == (status, reason)
        assert len(site.received("P1")) == asked_p
        assert len(site.received("D1")) == asked_d
        assert pauses.taken == [PAUSE_S] * (asked_p - 1)
        site.engines["P1"].faults = Faults()
        if status == 200:
            assert answer.text == (await site.ask(stream=True)).text
        else:
            assert answer.body["error"]["message"]
        await site.until(site.is_idle)


@pytest.mark.parametrize(
    ("policy", "status", "reason"),
    [(DECODE, 200, "prefill_failed"), (ERROR, 504, "prefill_named"), (RETRY, 504, "prefill_named")],
)
async def test_a_p_that_is_too_slow_is_not_asked_again(policy: FailurePolicy, status: int, reason: str) -> None:
    """It would begin anew, and the client has waited for it already."""
    pauses = Pauses()
    async with Site.of(policy=policy, pause=pauses, settings={"prefill_timeout_s": 0.2}) as site:
        site.engines["P1"].faults = Faults(orders=[Order(FaultKind.HANG, times=9)])
        answer = await site.ask(site.to_p)
        assert (answer.status, answer.headers["X-PPD-Reason"]) == (status, reason)
        assert (len(site.received("P1")), pauses.taken) == (1, [])
        await site.until(site.is_idle)


@pytest.mark.parametrize("policy", [DECODE, ERROR, RETRY])
async def test_a_p_that_hands_nothing_over_has_not_failed(policy: FailurePolicy) -> None:
    async with Site.of(policy=policy) as site:
        site.engines["P1"].faults = Faults(orders=[Order(FaultKind.HANDOFF)])
        answer = await site.ask(site.to_p)
        assert (answer.status, len(site.received("P1")), len(site.received("D1"))) == (200, 1, 1)


@pytest.mark.parametrize(("policy", "status", "tries"), [(DECODE, 200, 1), (ERROR, 502, 1), (RETRY, 502, 3)])
async def test_when_p_is_dead_the_operators_choice_follows(policy: FailurePolicy, status: int, tries: int) -> None:
    pauses = Pauses()
    async with Site.of(policy=policy, pause=pauses) as site:
        to_p = site.to_p
        await site.kill("P1")
        answer = await site.ask(to_p)
        assert (answer.status, len(pauses.taken)) == (status, tries - 1)
        assert to_p["x-prefiller-host-port"].encode() not in answer.raw


@pytest.mark.parametrize(("key", "status"), [("", 403), ("the sidecar's own", 502)])
@pytest.mark.parametrize("policy", [ERROR, RETRY])
async def test_a_p_that_refuses_the_sidecars_own_key_is_not_the_clients_fault(
    policy: FailurePolicy, key: str, status: int
) -> None:
    async with Site.of(policy=policy, settings={"worker_api_key": key}) as site:
        site.engines["P1"].faults = refusing(403)
        assert (await site.ask(site.to_p)).status == status
        assert len(site.received("P1")) == 1, "it would say the same again"


@pytest.mark.parametrize(("on_failure", "retries"), [(OnFailure.RETRY, 0), (OnFailure.DECODE, 1), (OnFailure.ERROR, 1)])
def test_retries_are_of_the_policy_that_retries(on_failure: OnFailure, retries: int) -> None:
    with pytest.raises(ConfigError, match=rf"prefill_retries = {retries}: must be at least 1 with"):
        FailurePolicy(on_failure, retries)


@pytest.mark.parametrize(("policy", "status"), [(DECODE, 200), (ERROR, 502)])
async def test_a_handoff_that_the_engine_cannot_use_counts_as_ps_failure(policy: FailurePolicy, status: int) -> None:
    async with Site.of(policy=policy) as site:
        site.engines["D1"].faults = Faults(orders=[Order(FaultKind.ERROR, leg=FaultLeg.DECODE)])
        answer = await site.ask(site.to_p)
        assert answer.status == status
        if status == 200:
            assert answer.headers["X-PPD-Reason"] == "handoff_failed"


@pytest.mark.parametrize(("fault", "status"), [(refusing(429), 429), (refusing(503), 503), (refusing(500), 502)])
@pytest.mark.parametrize("is_split", [False, True])
async def test_what_the_engine_says_of_itself_stays_inside(fault: Faults, status: int, is_split: bool) -> None:
    async with Site.of() as site:
        site.engines["D1"].faults = deepcopy(fault)
        answer = await site.ask(site.to_p if is_split else None)
        assert answer.status == status
        assert ("Retry-After" in answer.headers) == (status != 502)


@pytest.mark.parametrize("is_split", [False, True])
async def test_a_dead_engine_is_said_to_be_unreachable(is_split: bool) -> None:
    async with Site.of() as site:
        await site.kill("D1")
        answer = await site.ask(site.to_p if is_split else None)
        assert (answer.status, answer.headers["X-PPD-Refused"]) == (503, "no_worker")
        assert (await site.get("/health")).status == 503
        assert (await site.get("/v1/models")).status == 503


async def test_a_stream_that_breaks_ends_with_an_error_and_no_done() -> None:
    async with Site.of() as site:
        site.engines["D1"].faults = Faults(cut=1, cut_after_events=4)
        answer = await site.ask(site.to_p, stream=True)
        assert answer.status == 200
        assert b'"error"' in answer.raw.splitlines()[-2] and b"[DONE]" not in answer.raw
        await site.until(site.is_idle)


async def leave(site: Site, phase: str, body: dict[str, Any]) -> None:
    """A client that leaves while P computes, or in the middle of the answer."""
    p, d = site.engines["P1"], site.engines["D1"]

    async def ask() -> None:
        async with site.session.post(site.base_url + CHAT, json=body, headers=site.to_p) as response:
            async for _ in response.content:
                pass

    asking = asyncio.create_task(ask())
    await site.until(lambda: bool((p if phase == "prefill" else d).scheduler.sequences))
    asking.cancel()
    await asyncio.wait({asking})


async def test_a_client_may_leave_before_p_is_asked_again() -> None:
    waiting = asyncio.Event()

    async def for_ever(_: float) -> None:
        waiting.set()
        await asyncio.Event().wait()

    async with Site.of(policy=RETRY, pause=for_ever) as site:
        site.engines["P1"].faults = refusing(503)
        asking = asyncio.create_task(site.ask(site.to_p))
        await waiting.wait()
        asking.cancel()
        (receipt,) = site.sidecar.state.receipts.newest(1)
        await site.until(lambda: receipt.outcome == "cancelled")
        assert (receipt.status, site.is_idle()) == (499, True)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "answer"])
@pytest.mark.parametrize("stream", [True, False])
async def test_no_kv_stays_on_p_when_a_client_leaves(phase: str, stream: bool) -> None:
    async with Site.of(engine={"time_scale": 2.0}) as site:
        body = {"model": "sim", "messages": [{"role": "user", "content": "Words. " * 40}], "max_tokens": 400}
        await leave(site, phase, {**body, "stream": stream})
        await site.until(site.is_idle)
        assert site.sidecar.state.handoffs.outstanding(site.sidecar.state.now()) == 0
        assert site.engines["P1"].pinned == 0
