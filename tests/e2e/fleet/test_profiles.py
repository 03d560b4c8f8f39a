"""Mode `profiles`: llm-d's configuration decides, over simulated engines."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from ppd.proxy.config import Mode
from ppd.servers.sim.engine.engine import SimEngine
from tests.e2e.gateway.envoy_program import carried, is_over, sidecar_before
from tests.support.decisions import BY_ROLES, LLM_D_EXAMPLE, LLM_D_HEAD
from tests.support.fleet import Fleet
from tests.support.proxy import Chat, Turn

pytestmark = pytest.mark.e2e


async def completed(fleet: Fleet, prompt: str) -> Turn:
    return await fleet.post("/v1/completions", {"model": "sim", "prompt": prompt, "max_tokens": 1, "temperature": 0})


async def test_the_proposals_example_splits_first_and_keeps_a_cached_follow_up() -> None:
    async with Fleet.of(mode=Mode.PROFILES, epp_config=str(LLM_D_EXAMPLE)) as fleet:
        for name, role in (("P1", "prefill"), ("P2", "prefill"), ("D1", "decode"), ("D2", "decode"), ("D3", "other")):
            await fleet.add(name, options=f",label.role={role}")
        prompt = "A thing that lasts. " * 40
        first = await completed(fleet, prompt)
        assert (first.status, first.route, first.reason) == (200, "SPLIT", "many_uncached")
        again = await completed(fleet, prompt + first.body["choices"][0]["text"] + "So?")
        assert (again.status, again.route, again.reason) == (200, "LOCAL", "few_uncached")
        assert again.headers["X-PPD-Decode"] == first.headers["X-PPD-Decode"] != "D3"
        assert again.body["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) - 16
        other = await completed(fleet, prompt + "x" * 400)
        assert (other.route, other.headers["X-PPD-Decode"]) == ("SPLIT", first.headers["X-PPD-Decode"])
        receipt = await fleet.receipt(again)
        assert receipt["mode"] == "profiles"
        assert receipt["candidates"]["terms"]["prefix-cache-scorer"] == [pytest.approx(1.0, abs=0.02)]
        await fleet.until(fleet.idle)


async def test_a_turn_that_no_profile_lets_anywhere_is_refused() -> None:
    async with Fleet.of(mode=Mode.PROFILES, epp_config=str(LLM_D_EXAMPLE)) as fleet:
        await fleet.add("D1", options=",label.role=other")
        refused = await completed(fleet, "hi")
        assert (refused.status, refused.headers["X-PPD-Refused"]) == (503, "no_worker")


def endpoint(engine: SimEngine, name: str, role: str) -> str:
    host, _, port = engine.address.rpartition(":")
    return f"- {{name: {name}, address: {host}, port: '{port}', labels: {{llm-d.ai/role: {role}}}}}\n"


async def test_workers_come_from_a_file_that_changes(tmp_path: Path) -> None:
    (file := tmp_path / "endpoints.yaml").write_text("endpoints: []\n")
    discovery = f"- {{type: file-discovery, parameters: {{path: {file}, watchFile: true}}}}\n"
    (plugins := tmp_path / "epp.yaml").write_text(LLM_D_HEAD + BY_ROLES.replace("\n", f"\n{discovery}", 1))
    async with Fleet.of(mode=Mode.PROFILES, epp_config=str(plugins)) as fleet:
        engines = [await fleet.start(name) for name in ("P1", "D1")]
        told = "".join(map(endpoint, engines, ("p", "d"), ("prefill", "decode")))
        file.write_text(f"endpoints:\n{told}")
        await fleet.until(lambda: fleet.states() == {"P1": "up", "D1": "up"})
        first = await completed(fleet, "A thing that lasts. " * 40)
        assert (first.status, first.route) == (200, "SPLIT")
        file.write_text(f"endpoints:\n{endpoint(engines[1], 'd', 'decode')}")
        await fleet.until(lambda: fleet.states() == {"D1": "up"})


HANDLED = """plugins:
- {{type: prefill-filter}}
- {{type: decode-filter}}
- {{name: decider, type: {decider}}}
- {{type: {handler}, parameters: {{{parameters}}}}}
schedulingProfiles:
- {{name: prefill, plugins: [{{pluginRef: prefill-filter}}]}}
- {{name: decode, plugins: [{{pluginRef: decode-filter}}]}}
"""
BY_PREFIX, ALWAYS = "prefix-based-pd-decider, parameters: {nonCachedTokens: 100}", "always-disagg-pd-decider"
PD, DISAGG = "pd-profile-handler", "disagg-profile-handler"


@pytest.mark.parametrize(
    ("handler", "parameters", "decider", "decisions"),
    [
        (PD, "deciderPluginName: decider", BY_PREFIX, ["SPLIT many_uncached", "LOCAL few_uncached"]),
        (PD, "deciderPluginName: decider, primaryPort: 8000", ALWAYS, ["SPLIT always_disagg"] * 2),
        (DISAGG, "deciders: {prefill: decider}", BY_PREFIX, ["SPLIT many_uncached", "LOCAL few_uncached"]),
        (DISAGG, "stageOrder: decode-first, deciders: {prefill: decider}", ALWAYS, ["SPLIT always_disagg"] * 2),
        (DISAGG, "stageOrder: prefill-first", ALWAYS, ["SPLIT prefill_first"] * 2),
        (DISAGG, "", ALWAYS, ["LOCAL no_decider"] * 2),
    ],
)
async def test_each_handler_decides_what_envoy_and_a_sidecar_carry_out(
    tmp_path: Path, handler: str, parameters: str, decider: str, decisions: list[str]
) -> None:
    (plugins := tmp_path / "epp.yaml").write_text(
        LLM_D_HEAD + HANDLED.format(handler=handler, parameters=parameters, decider=decider)
    )
    async with carried(tmp_path, "P1", mode=Mode.PROFILES, epp_config=str(plugins)) as (fleet, envoy):
        engine = await fleet.start("D1")
        async with sidecar_before(engine.address, fleet.proxy) as address:
            await fleet.join("D1", engine, address)
            chat, seen = Chat(envoy), []
            for said in ("Tell me of a thing that lasts. " * 20, "So?"):
                turn = await chat.say(said, max_tokens=4)
                assert turn.status == 200
                seen.append(f"{turn.route} {turn.reason}")
                await fleet.until(partial(is_over, fleet, turn.headers["x-request-id"]))
            assert seen == decisions
            assert len(fleet.engines["P1"].received) == sum(each.startswith("SPLIT") for each in decisions)
            assert turn.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            await fleet.until(fleet.idle)
