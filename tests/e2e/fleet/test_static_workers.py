"""What agents, and strangers, can do to workers that the config names, and who gets the proxy's key."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.proxy.config import Mode
from tests.support.announcements import Sender


async def test_a_stranger_drains_no_worker_of_the_config(start_fleet: Any, port: int, sender: Sender) -> None:
    """Its host is another machine; who sends is on this one."""
    async with start_fleet("", heartbeat_port=port) as fleet:
        await fleet.admin("POST", "/workers", {"worker": "R=192.0.2.1:80"})
        for said in ({"draining": True}, {"leaving": True}, {"running": 9}):
            await sender.beat("192.0.2.1:80", role="R", **said)
        await sender.beat("10.0.0.1:80")
        await fleet.until(lambda: len(fleet.states()) == 2)
        (view,) = [view for view in fleet.proxy.state.registry.views() if view.id == "192.0.2.1:80"]
        assert (view.draining, view.load.running) == (False, 0)
        assert await fleet.metric('ppd_heartbeats_total{result="dropped"}') == 3


@pytest.mark.parametrize("end", ["restart", "operator"])
async def test_a_static_worker_that_its_agent_drained_is_not_drained_for_good(
    start_fleet: Any, port: int, sender: Sender, end: str
) -> None:
    async with start_fleet("R1", heartbeat_port=port, mode=Mode.REPLICA, probe_interval_s=0.05) as fleet:
        address = fleet.engines["R1"].address
        await sender.beat(address, role="R", draining=True)
        await fleet.until(lambda: fleet.state("R1") == "draining")
        if end == "restart":
            await fleet.kill("R1")
            await fleet.until(lambda: fleet.state("R1") == "down")
            await fleet.start_again("R1")
        else:
            status, _ = await fleet.admin("PATCH", f"/workers/{address}", {"draining": False})
            assert status == 200
        await fleet.until(lambda: fleet.state("R1") == "up")
        assert (await fleet.conversation().say("hi")).status == 200


async def test_with_an_open_port_an_announced_worker_gets_prompts_but_not_the_proxys_key(
    start_fleet: Any, port: int, sender: Sender
) -> None:
    settings = {"heartbeat_port": port, "heartbeat_host": "*", "heartbeat_open": True}
    async with start_fleet("", worker_api_key="inner", mode=Mode.REPLICA, **settings) as fleet:
        engine = await fleet.start("R1", api_key="inner")  # answers 401 to all who do not send its key
        await sender.beat(engine.address, role="R")
        await fleet.until(lambda: fleet.states() == {"R1": "up"})
        prompt = {"model": "sim", "prompt": "hi"}
        assert (await fleet.post("/v1/completions", prompt, {"Authorization": "Bearer client"})).status == 502
        status, _ = await fleet.admin("POST", "/workers", {"worker": f"R={engine.address}"})
        assert status == 201
        await fleet.until(lambda: all(view.worker.is_trusted for view in fleet.proxy.state.registry.views()))
        await fleet.until(lambda: fleet.states() == {"R1": "up"})
        assert (await fleet.post("/v1/completions", prompt)).status == 200
