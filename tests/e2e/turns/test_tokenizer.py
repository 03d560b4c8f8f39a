"""With a tokenizer the proxy knows of any prompt what workers hold of it, by their KV events."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ppd.proxy.config import Mode
from ppd.proxy.tokenizer.count_checks import PROVEN
from tests.e2e.turns.test_kv_events import BLOCK, PUBLISHING, add, is_heard
from tests.proxy.tokenizer.tokenizer_folders import LOOPING, REFUSING, characters, write_tokenizer
from tests.support.credentials import bearer, client, write_keys
from tests.support.fleet import Fleet
from tests.support.processes import proxy_group
from tests.support.proxy import ProxyClient, Turn

HEAD: dict[str, Any] = {"role": "system", "content": "You are one of many, who all are told the same at first. " * 20}
PLENTY_S = 20.0  # on a busy machine; nothing here is late by chance


@asynccontextmanager
async def fleet_with(tokenizer: Path, names: str = "R1 R2", **settings: Any) -> AsyncIterator[Fleet]:
    told = {"mode": Mode.REPLICA, "tokenizer": str(tokenizer), "tokenizer_wait_s": PLENTY_S, **settings}
    async with Fleet.of(**told) as fleet:
        for name in names.split():
            await add(fleet, name)
        yield fleet


async def say(at: ProxyClient, text: str, *, head: dict[str, Any] = HEAD, **body: Any) -> tuple[Turn, dict[str, Any]]:
    """The first turn of another session; after it, all events are read."""
    turn = await at.chat([head, {"role": "user", "content": text}], **body)
    assert turn.status == 200, turn.body
    return turn, await at.receipt(turn)


async def heard(fleet: Fleet) -> None:
    """All events are read, and the workers have reported that they are idle."""
    for engine in fleet.engines.values():
        await fleet.until(partial(is_heard, fleet, engine))
    await fleet.until(
        lambda: not any(view.requests or view.placed_tokens for view in fleet.proxy.state.registry.views())
    )


async def prove(fleet: Fleet, **body: Any) -> None:
    for number in range(PROVEN):
        await say(fleet, f"{number}", head={"role": "system", "content": f"{number} is short"}, **body)
    await heard(fleet)


async def test_a_first_turn_knows_who_holds_its_head(tmp_path: Path) -> None:
    async with fleet_with(write_tokenizer(tmp_path)) as fleet:
        await prove(fleet)
        first, receipt = await say(fleet, "The first of all.")
        assert (receipt["prompt_evidence"], receipt["estimated_cached_tokens"]) == ("tokenizer", 0)
        assert receipt["estimated_prompt_tokens"] == receipt["prompt_tokens"]
        for number in range(2):
            await heard(fleet)
            turn, receipt = await say(fleet, f"{number} begins alike.")
            assert receipt["kind"] == "first"
            assert receipt["cached_evidence"] == "kv_events"
            assert receipt["estimated_prompt_tokens"] == receipt["prompt_tokens"]
            assert receipt["estimated_cached_tokens"] == receipt["cached_tokens"] > len(HEAD["content"])
            assert receipt["decode"] == first.headers["X-PPD-Decode"], turn.headers
        assert await fleet.metric('ppd_token_counts_total{result="wrong"}') == 0


async def test_what_is_not_there_is_not_claimed_of_a_session_either(tmp_path: Path) -> None:
    """Its own turns, and events with its name, tell of its newest prompt; tokens tell of the one that is asked now."""
    async with fleet_with(write_tokenizer(tmp_path), "R1") as fleet:
        await prove(fleet)
        chat = fleet.conversation()
        for number in range(4):
            await heard(fleet)
            turn = await chat.say(f"{number} " + "and so on, and so on; " * 20)
            receipt = await fleet.receipt(turn)
            assert receipt["estimated_cached_tokens"] == receipt["cached_tokens"]
            assert receipt["estimated_prompt_tokens"] == receipt["prompt_tokens"]
        assert receipt["cached_tokens"] > 3 * BLOCK


async def test_a_salted_prompt_never_sees_anothers(tmp_path: Path) -> None:
    async with fleet_with(write_tokenizer(tmp_path), "R1") as fleet:
        await prove(fleet)
        for salt, again in [("one", False), ("other", False), (None, False), ("one", True), (None, True)]:
            told: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
            _, receipt = await say(fleet, f"{salt} {again}", **told)
            await heard(fleet)
            assert bool(receipt["cached_tokens"]) is again
            assert bool(receipt["estimated_cached_tokens"]) is again


async def test_tenants_do_not_see_each_others_prompts(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", *map(client, ("ann", "bob")))
    async with fleet_with(write_tokenizer(tmp_path / "model"), "R1", keys_file=keys) as fleet:
        for tenant in ("ann", "bob"):
            for number in range(PROVEN):
                await say(fleet, f"{number}", head={"role": "system", "content": "short"}, headers=bearer(tenant))
        for tenant, again in [("ann", False), ("bob", False), ("ann", True), ("bob", True)]:
            _, receipt = await say(fleet, f"{tenant} {again}", headers=bearer(tenant))
            await heard(fleet)
            assert receipt["prompt_evidence"] == "tokenizer"
            assert bool(receipt["estimated_cached_tokens"] > BLOCK) is again
            assert receipt["estimated_cached_tokens"] == receipt["cached_tokens"]


async def test_the_tokenizer_of_another_model_says_so_and_claims_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = write_tokenizer(tmp_path, tokenizer=characters(piece="told the same"))
    with caplog.at_level(logging.WARNING, "ppd.proxy.tokenizer"):
        async with fleet_with(other, "R1") as fleet:
            for number in range(PROVEN + 2):
                _, receipt = await say(fleet, f"{number}")
                assert (receipt["prompt_evidence"], receipt["cached_evidence"]) != ("tokenizer", "kv_events")
                await heard(fleet)
            assert await fleet.metric('ppd_token_counts_total{result="wrong"}') == PROVEN + 2
    assert sum("is it another model's" in line for line in caplog.messages) == 1


@pytest.mark.parametrize(("template", "result"), [(REFUSING, "refused"), (LOOPING, "late")])
async def test_a_template_that_gives_no_prompt_costs_a_turn_nothing(tmp_path: Path, template: str, result: str) -> None:
    folder = write_tokenizer(tmp_path, template)
    async with fleet_with(folder, "R1", tokenizer_wait_s=0.05 if result == "late" else PLENTY_S) as fleet:
        turn, receipt = await say(fleet, "hello")
        assert receipt["prompt_evidence"] == "estimate"
        assert await fleet.metric(f'ppd_prompts_tokenized_total{{result="{result}"}}') == 1
        assert turn.text


async def test_every_process_knows_what_is_held_of_any_prompt(tmp_path: Path) -> None:
    told: dict[str, Any] = {
        "tokenizer": str(write_tokenizer(tmp_path)),
        "tokenizer_wait_s": PLENTY_S,
        "mode": Mode.REPLICA,
    }
    async with proxy_group("R1", engine=PUBLISHING, **told) as group:
        for one in group.proxies.values():
            for number in range(PROVEN):
                await say(one, f"{number}", head={"role": "system", "content": f"{number} is short"})
        await say(group.proxies[0], "The first of all.")
        await group.until(lambda: all(is_heard(one, group.engines["R1"]) for one in group.proxies.values()))
        _, receipt = await say(group.proxies[1], "Another one, at the other process.")
        assert receipt["cached_evidence"] == "kv_events"
        assert receipt["estimated_cached_tokens"] == receipt["cached_tokens"] > len(HEAD["content"])
