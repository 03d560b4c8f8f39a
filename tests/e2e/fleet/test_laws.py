"""The laws of a proxy that runs: what operators are told, and how they make it forget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ppd.proxy.config import Mode
from ppd.proxy.laws.corrections import Figure, Measured
from ppd.proxy.laws.profile_file import encode, find
from ppd.proxy.laws.worker_laws import TurnTimes, likes_of

SHIPPED = "h100-llama-3.1-8b"
SLOW_STEP_S = 0.5


async def test_operators_see_corrections_and_reset_them(start_fleet: Any) -> None:
    async with start_fleet("R1", profile=SHIPPED) as fleet:
        laws, (view,) = fleet.proxy.state.laws, fleet.proxy.state.registry.views()
        likes = likes_of(SHIPPED, view.worker)
        both = [Measured(view.id, view.incarnation, likes, figure, 0.1, 1.0, 0.3) for figure in Figure]
        for number in range(200):
            laws.learn(TurnTimes(0, both), fleet.proxy.state.now() + number)
        _, said = await fleet.admin("GET", "/laws")
        (worker,) = said["workers"]
        assert (worker["name"], worker["profile"], worker["ttft"]["factor"] > 2) == ("R1", SHIPPED, True)
        assert [one["stale"] for one in said["judged"]] == [True, True]
        gauge = f'ppd_laws_stale{{basis="profile",figure="ttft",name="{SHIPPED}"}}'
        assert await fleet.metric(gauge) == 1
        status, said = await fleet.admin("POST", "/laws/reset")
        assert (status, said["workers"][0]["ttft"]["factor"], said["judged"]) == (200, 1.0, [])
        assert await fleet.metric(gauge) == 0
        status, _ = await fleet.admin("POST", "/laws/reset", key="wrong")
        assert status == 401


async def test_a_worker_is_not_added_with_a_profile_that_is_not_there(start_fleet: Any) -> None:
    async with start_fleet("R1") as fleet:
        status, said = await fleet.admin("POST", "/workers", {"worker": "D=192.0.2.1:80,profile=none"})
        assert (status, "profile = 'none'" in said["error"]["message"]) == (400, True)
        status, _ = await fleet.admin("POST", "/workers", {"worker": f"D=192.0.2.1:80,profile={SHIPPED}"})
        assert status == 201
        _, said = await fleet.admin("GET", "/laws")
        assert [one["profile"] for one in said["workers"]] == [SHIPPED]


async def test_streamed_turns_teach_the_laws(start_fleet: Any, tmp_path: Path) -> None:
    """Engines that answer at once are faster, on a busy machine too, than a profile of half a second a token."""
    slow, shipped = tmp_path / "slow.json", find(SHIPPED)
    costs = replace(shipped.costs, step_s=SLOW_STEP_S)
    slow.write_bytes(encode(msgspec.structs.replace(shipped, name="slow", costs=costs)))
    async with start_fleet("P1 D1 D2", profile=str(slow), mode=Mode.SLO) as fleet:
        for number in range(12):
            messages = [{"role": "user", "content": f"{number} hello"}]
            turn = {"model": "sim", "messages": messages, "max_tokens": 24, "stream": True}
            url = f"{fleet.base_url}/v1/chat/completions"
            async with fleet.session.post(url, json=turn | {"stream_options": {"include_usage": True}}) as answer:
                await answer.read()
        _, receipt = await fleet.admin("GET", f"/requests/{answer.headers['X-Request-Id']}")
        assert SLOW_STEP_S / 4 < receipt["predicted_tpot_s"] < receipt["predicted_ttft_s"] < 4 * SLOW_STEP_S
        assert receipt["laws"] != fleet.proxy.state.laws.version
        _, said = await fleet.admin("GET", "/laws")
        assert min(worker["tpot"]["factor"] for worker in said["workers"]) < 0.95
        assert {one["figure"]: one["turns"] > 5 for one in said["judged"]} == {"ttft": True, "tpot": True}
