"""A run of a sweep on real vLLM: exact prompts, forced routes, and histories that its prefix cache finds."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.load.measure import measure
from ppd.offline.load.target import Api, Target
from ppd.servers.vllm.launch import TINY_NAME
from tests.support.proxy import ADMIN_KEY

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK = 32  # tokens; what is cached is whole blocks
WORKLOAD = Workload(
    first=Profile(name="first", new_tokens=160, output_tokens=24),
    later=Profile(name="later", new_tokens=48, output_tokens=16),
    turns=3,
)


@pytest.mark.parametrize("api", list(Api))
@pytest.mark.parametrize(
    ("topology", "x", "later"), [("1P_1D", 0.0, "SPLIT"), ("1P_1D", 1.0, "LOCAL"), ("1R", None, "REPLICA")]
)
async def test_every_turn_goes_the_way_it_is_sent_with_exactly_its_tokens(
    fleet: Any, api: Api, topology: str, x: float | None, later: str
) -> None:
    run = Run(topology=topology, x=x, workload=WORKLOAD, qps=2.0, seconds=1.0, conversations=3)
    target = Target(url=fleet.base_url, model=TINY_NAME, api=api, admin_key=ADMIN_KEY, forces_routes=True)
    records = await measure(run, target)
    assert [record.error for record in records] == [""] * 9
    first = "REPLICA" if x is None else "SPLIT"
    assert [record.route for record in records] == [first, later, later] * 3
    assert [record.output_tokens for record in records] == [24, 16, 16] * 3
    lengths = (160, 160 + 24 + 48, 160 + 24 + 48 + 16 + 48)
    for record in records:
        if api is Api.COMPLETIONS or record.turn == 1:  # an answer read again as text may be other tokens
            assert record.prompt_tokens == lengths[record.turn - 1]
        assert record.ttft_s is not None
        assert record.tpot_s is not None
        if api is Api.COMPLETIONS and record.turn > 1 and later != "SPLIT":
            held = lengths[record.turn - 2] + (24 if record.turn == 2 else 16)
            assert record.cached_tokens is not None
            assert held - 2 * BLOCK < record.cached_tokens <= held
