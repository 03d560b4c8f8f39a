"""Whose word counts for a turn's targets, on a real fleet."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.proxy.laws.targets import given_targets
from tests.support.credentials import bearer, client, write_keys

pytestmark = pytest.mark.e2e


async def slo_of(fleet: Any, headers: dict[str, str], **members: Any) -> tuple[float, float]:
    body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **members}
    turn = await fleet.post("/v1/chat/completions", body, headers)
    assert turn.status == 200, turn.body
    slo = (await fleet.receipt(turn))["slo"]
    return slo["ttft_s"], slo["tpot_s"]


@pytest.mark.parametrize("plane", ["direct", "asgi"])
async def test_header_key_class_config(start_fleet: Any, tmp_path: Any, plane: str) -> None:
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
