"""Handoffs whose D was never reached: which other D takes the KV off P's hands."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from ppd.proxy.connectors.leg import Handoff
from ppd.proxy.connectors.nixl import READS_BACK
from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Leg, Phase
from ppd.proxy.upstream.call import Expiry
from tests.proxy.routing.legs.release_lab import Lab, released, unreached

pytestmark = pytest.mark.slow


async def test_a_handoff_is_released_to_the_least_loaded_d(lab: Lab) -> None:
    d1, d2, _ = await lab.decode("D1"), await lab.decode("D2"), await lab.decode("D3")
    lab.proxy.state.registry.reserve(d2.id)
    assert await released(lab, lab.running(d1)) == 0
    assert [len(lab.asked[name]) for name in ("D1", "D2", "D3")] == [0, 0, 1]
    assert all(view.inflight == (view.id == d2.id) for view in lab.proxy.state.registry.views())


async def test_a_handoff_that_is_too_old_is_left_to_its_lease(lab: Lab) -> None:
    """A D that reads blocks of others keeps them in its cache as those of this prompt."""
    d1, _ = await lab.decode("D1"), await lab.decode("D2")
    made = lab.running(d1)
    made.expiry = Expiry.of(lab.proxy.upstream.uptime() - 20.0, 20.0)
    assert await released(lab, made) == 1
    assert lab.asked["D2"] == []


TOKEN = {"choices": [{"index": 0, "delta": {"content": "hi"}}]}
ERROR = {"error": {"message": "the KV did not come", "code": 500}}


@pytest.mark.parametrize(("event", "left"), [(TOKEN, 0), (ERROR, 1)])
async def test_a_d_from_which_p_may_read_back_is_left_as_it_begins(lab: Lab, event: dict[str, Any], left: int) -> None:
    """It keeps the KV of each answer that it ends."""
    d1, _ = await lab.decode("D1"), await lab.decode("D2", event=event, coordinates={READS_BACK: "true"})
    assert await released(lab, lab.running(d1)) == left
    (body,) = lab.asked["D2"]
    assert (body["stream"], body["kv_transfer_params"]) == (True, {"remote_request_id": "kv"})
    async with asyncio.timeout(60):
        while not lab.closed:
            await asyncio.sleep(0.001)
    assert lab.closed == ["D2"]


@pytest.mark.parametrize(
    ("lender", "own", "other", "taken"),
    [("D1", "D2", "D3", True), ("D1", "D2", "R1", False), ("D1", "R1", "R2", True), ("R1", "R2", "D1", True)],
)
async def test_what_a_lender_pins_is_released_by_another(
    lab: Lab, lender: str, own: str, other: str, taken: bool
) -> None:
    """An R that no turn has proved to pull is not asked, nor ever the lender itself."""
    first, second, _ = [await lab.decode(name) for name in (lender, own, other)]
    assert await released(lab, lab.running(second, first)) == (not taken)
    assert [len(lab.asked[name]) for name in (lender, own, other)] == [0, 0, int(taken)]


@pytest.mark.parametrize(
    "other",
    [{"draining": True}, {"connector": "p2p_nccl"}, {"status": 500}, {"has_sidecar": True}],
    ids=["draining", "unlike", "failing", "behind a sidecar"],
)
async def test_a_handoff_that_no_d_takes_waits_for_its_lease(lab: Lab, other: dict[str, Any]) -> None:
    d1 = await lab.decode("D1")
    await lab.decode("D2", **other)
    assert await released(lab, lab.running(d1)) == 1


async def test_a_d_that_is_gone_keeps_no_handoff_from_waiting_for_its_lease(lab: Lab) -> None:
    d1 = await lab.decode("D1")
    lab.join("D2", "127.0.0.1:1")
    assert await released(lab, lab.running(d1)) == 1
    assert not any(view.inflight for view in lab.proxy.state.registry.views())


async def test_after_a_d_that_is_gone_the_next_one_is_asked_and_the_first_is_known_to_fail(lab: Lab) -> None:
    d1, gone = await lab.decode("D1"), lab.join("D2", "127.0.0.1:1")
    d3 = await lab.decode("D3")
    lab.proxy.state.registry.reserve(d3.id)
    assert await released(lab, lab.running(d1)) == 0
    assert len(lab.asked["D3"]) == 1
    assert gone.id in lab.proxy.state.health.breakers.states(lab.proxy.state.now())


async def test_a_d_that_breaks_off_may_have_used_the_handoff(lab: Lab) -> None:
    """Which is good for one."""

    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    d1, d3 = await lab.decode("D1"), await lab.decode("D3")
    async with await asyncio.start_server(break_off, "127.0.0.1", 0) as breaking:
        lab.join("D2", f"127.0.0.1:{breaking.sockets[0].getsockname()[1]}")
        lab.proxy.state.registry.reserve(d3.id)
        assert await released(lab, lab.running(d1)) == 1
    assert lab.asked["D3"] == []


async def test_a_d_whose_breaker_is_open_is_asked_last(lab: Lab) -> None:
    d1, d2, d3 = await lab.decode("D1"), await lab.decode("D2"), await lab.decode("D3")
    refused = LegError("", worker=d2.id, phase=Phase.CONNECT, cause=Cause.REFUSED)
    lab.proxy.state.health.leg_failed(Leg.DECODE, refused, d2.id, lab.proxy.state.now())
    lab.proxy.state.registry.reserve(d3.id)
    assert await released(lab, lab.running(d1)) == 0
    assert [len(lab.asked[name]) for name in ("D2", "D3")] == [0, 1]


async def test_without_a_free_descriptor_the_handoff_waits_for_its_lease(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    d1, _ = await lab.decode("D1"), await lab.decode("D2")

    def none_left(*_: object) -> Any:
        raise OSError(errno.EMFILE, "none left")

    monkeypatch.setattr("ppd.proxy.upstream.pool._socket", none_left)
    assert await released(lab, lab.running(d1)) == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_connector_that_pins_nothing_has_nothing_to_release(lab: Lab) -> None:
    p, d1 = lab.join("P2", "p:2", connector="none"), await lab.decode("D1", connector="none")
    await lab.decode("D2", connector="none")
    made = lab.running(d1, p)
    made.handoff = Handoff({}, 10, None)
    unreached(made)
    lab.proxy.handoff_release.release(made)
    await lab.wound_up()
    assert lab.asked["D2"] == []


async def test_a_crowd_that_leaves_comes_in_small_groups(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.proxy.handoff_release, "_places", asyncio.Semaphore(2))
    d1, gone = await lab.decode("D1"), lab.join("D2", "127.0.0.1:1")
    await lab.decode("D3"), await lab.decode("D4")
    for _ in range(12):
        made = lab.running(d1)
        lab.announce(made)
        unreached(made)
        lab.proxy.handoff_release.release(made)
    await lab.wound_up()
    asked = [len(lab.asked[name]) for name in ("D3", "D4")]
    assert sum(asked) == 12 and min(asked) > 0, "each goes to the D that is the least loaded when its turn comes"
    assert lab.most_at_once <= 2
    assert gone.id in lab.proxy.state.health.breakers.blocked(lab.proxy.state.now())
