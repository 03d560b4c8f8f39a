"""Targets of turns on a real fleet: whose word counts, and what the receipt says of the ways that were judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ppd.proxy.config import DataPlane, Mode
from ppd.proxy.laws.targets import given_targets
from ppd.proxy.telemetry.receipts import Receipt
from tests.support.credentials import bearer, client, write_keys

pytestmark = pytest.mark.e2e


async def slo_of(fleet: Any, headers: dict[str, str], **members: Any) -> tuple[float, float]:
    body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **members}
    turn = await fleet.post("/v1/chat/completions", body, headers)
    assert turn.status == 200, turn.body
    slo = (await fleet.receipt(turn))["slo"]
    return slo["ttft_s"], slo["tpot_s"]


@pytest.mark.parametrize("plane", [DataPlane.NATIVE, DataPlane.ASGI])
async def test_header_key_class_config(start_fleet: Any, tmp_path: Any, plane: DataPlane) -> None:
    keys = write_keys(
        tmp_path / "keys.toml", client("usual"), client("batch", priority=20, slo=given_targets("ttft=9"))
    )
    told = {"keys_file": keys, "slo_tpot_s": 0.05, "slo_by_priority": ("10:ttft=5,tpot=0.2",), "data_plane": plane}
    async with start_fleet("D1", **told) as fleet:
        assert await slo_of(fleet, bearer("usual")) == (0.25, 0.05)
        assert await slo_of(fleet, bearer("usual"), priority=10) == (5.0, 0.2)
        assert await slo_of(fleet, bearer("batch")) == (9.0, 0.2)
        assert await slo_of(fleet, bearer("batch"), priority=-5) == (9.0, 0.2), "no client raises its own class"
        assert await slo_of(fleet, bearer("batch") | {"X-PPD-SLO": "ttft=0.5"}) == (0.5, 0.2)
        assert (await fleet.admin("PUT", "/weights", {"slo_tpot_s": 0.1}))[0] == 200
        assert (await fleet.admin("PUT", "/weights", {"slo_tpot_s": 0}))[0] == 400
        assert await slo_of(fleet, bearer("usual")) == (0.25, 0.1)


async def test_a_list_of_prompts_has_the_targets_of_its_request(start_fleet: Any) -> None:
    async with start_fleet("D1") as fleet:
        body = {"model": "sim", "prompt": ["one", "two"], "max_tokens": 2}
        turn = await fleet.post("/v1/completions", body, {"X-PPD-SLO": "tpot=0.5", "X-Request-Id": "list"})
        assert turn.status == 200
        _, said = await fleet.admin("GET", "/requests")
        assert {receipt["slo"]["tpot_s"] for receipt in said["newest"]} == {0.5}


@pytest.mark.parametrize("plane", [DataPlane.NATIVE, DataPlane.ASGI])
async def test_the_receipt_has_the_ways_that_were_judged_and_how_far_off_they_were(
    start_fleet: Any, tmp_path: Path, plane: DataPlane
) -> None:
    log = tmp_path / "receipts.jsonl"
    told = {"mode": Mode.SLO, "profile": "h100-llama-3.1-8b", "receipt_log": str(log), "data_plane": plane}
    async with start_fleet("P1 D1 D2", **told) as fleet:
        chat = fleet.conversation()
        first = await chat.say("A message of some length. " * 40)
        streamed = {"model": "sim", "stream": True, "messages": [*chat.messages, {"role": "user", "content": "and on"}]}
        url = f"{fleet.base_url}/v1/chat/completions"
        async with fleet.session.post(url, json=streamed, headers={"X-Request-Id": "streamed"}) as answer:
            await answer.read()
        receipts = [await fleet.receipt(first), (await fleet.admin("GET", "/requests/streamed"))[1]]
    for receipt in receipts:
        found = receipt["candidates"]
        assert (found["route"][0], found["decode"][0]) == (receipt["route"], receipt["decode"])
        assert set(found["decode"]) == {"D1", "D2"}
        assert len(found["ttft_s"]) == len(found["route"]) > 1
    before, after = receipts
    assert after["candidates"]["held"]["own_turns"][before["decode"]] > before["estimated_prompt_tokens"] / 2
    assert all(isinstance(after[name], float) for name in ("ttft_error", "tpot_error"))
    assert before["ttft_error"] is None, "an answer that is not streamed has no times"
    logged = [msgspec.json.decode(line, type=Receipt) for line in log.read_bytes().splitlines()]
    assert [msgspec.to_builtins(one)["candidates"] for one in logged] == [one["candidates"] for one in receipts]
