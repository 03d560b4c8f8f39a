"""Tenants on shared workers: none learns another's prompts, continues its conversations or reads its responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppd.proxy.config import Mode
from tests.support.credentials import bearer, client, write_keys
from tests.support.proxy import Turn

SECRET = "A prompt that only its own tenant knows, and that is long enough to fill blocks. " * 8
STORES = {"stores_responses": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SECRET}]},
    "/v1/completions": {"prompt": SECRET},
    "/v1/responses": {"input": SECRET},
    "/v1/messages": {"messages": [{"role": "user", "content": SECRET}]},
}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return write_keys(tmp_path / "keys.toml", *map(client, ("one", "two", "three")))


def cached(turn: Turn) -> int:
    assert turn.status == 200, turn.body
    usage = turn.body["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    count = details["cached_tokens"] if details else usage["cache_read_input_tokens"]
    assert isinstance(count, int)
    return count


def sent(fleet: Any) -> list[Any]:
    return [json.loads(leg.body) for engine in fleet.engines.values() for leg in engine.received]


async def ask(fleet: Any, who: str, path: str = "/v1/chat/completions", **body: Any) -> Turn:
    cap = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    turn = await fleet.post(path, {"model": "sim", cap: 4, **BODIES.get(path, {}), **body}, bearer(who))
    assert isinstance(turn, Turn)
    return turn


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("workers", ["P1 D1", "R1"])
async def test_no_tenant_can_test_its_guesses_at_anothers_prompt(
    start_fleet: Any, keys: str, workers: str, path: str
) -> None:
    mode = Mode.REPLICA if workers == "R1" else Mode.ALWAYS_SPLIT
    async with start_fleet(workers, mode=mode, keys_file=keys) as fleet:
        assert cached(await ask(fleet, "one", path)) == 0
        assert cached(await ask(fleet, "two", path)) == 0
        assert cached(await ask(fleet, "one", path)) > 0
        salts = {body["cache_salt"] for body in sent(fleet)}
        assert len(salts) == 2, "one for each tenant, the same on P and on D"


async def test_tenants_that_the_config_names_share_cached_prompts(start_fleet: Any, keys: str) -> None:
    async with start_fleet("R1", mode=Mode.REPLICA, keys_file=keys, share_prefixes=("one", "two")) as fleet:
        assert cached(await ask(fleet, "one")) == 0
        assert cached(await ask(fleet, "three")) == 0
        assert cached(await ask(fleet, "two")) > 0


async def test_a_clients_own_salt_still_counts_and_steers_nobody_elses_cache(start_fleet: Any, keys: str) -> None:
    async with start_fleet("R1", mode=Mode.REPLICA, keys_file=keys) as fleet:
        assert cached(await ask(fleet, "one")) == 0
        (salt,) = {body["cache_salt"] for body in sent(fleet)}
        assert cached(await ask(fleet, "one", cache_salt="own")) == 0
        assert cached(await ask(fleet, "one", cache_salt="own")) > 0
        assert cached(await ask(fleet, "two", cache_salt="own")) == 0
        assert cached(await ask(fleet, "two", cache_salt=salt)) == 0


async def test_each_prompt_of_a_list_is_salted_once(start_fleet: Any, keys: str) -> None:
    async with start_fleet("R1", mode=Mode.REPLICA, keys_file=keys) as fleet:
        for _ in range(2):
            assert (await ask(fleet, "one", "/v1/completions", prompt=[SECRET, "other"])).status == 200
        assert cached(await ask(fleet, "one", "/v1/completions")) > 0
        assert len({body["cache_salt"] for body in sent(fleet)}) == 1


async def test_without_keys_bodies_stay_as_they_are(start_fleet: Any) -> None:
    async with start_fleet("R1", mode=Mode.REPLICA) as fleet:
        body = {"model": "sim", "input": "hi", "session_id": "s", "max_output_tokens": 4}
        assert (await fleet.post("/v1/responses", body, {"X-Session-ID": "mine"})).status == 200
        (leg,) = fleet.engines["R1"].received
        assert json.loads(leg.body) == body
        assert leg.headers["X-Session-ID"] == "mine"


async def test_ids_of_sessions_reach_workers_as_the_tenants_own(start_fleet: Any, keys: str) -> None:
    async with start_fleet("P1 D1", keys_file=keys) as fleet:
        for who in ("one", "two"):
            headers = {**bearer(who), "X-Session-ID": "shared-name"}
            body = {"model": "sim", "session_id": "shared-name", "max_tokens": 4, **BODIES["/v1/chat/completions"]}
            assert (await fleet.post("/v1/chat/completions", body, headers)).status == 200
        legs = [leg for engine in fleet.engines.values() for leg in engine.received]
        assert "shared-name" not in str([(leg.body, leg.headers) for leg in legs])
        assert len({leg.headers["X-Session-ID"] for leg in legs}) == 2
        assert len({json.loads(leg.body)["session_id"] for leg in legs}) == 2


async def test_only_its_own_tenant_continues_a_stored_response(start_fleet: Any, keys: str) -> None:
    async with start_fleet("P1 D1", engine=STORES, keys_file=keys) as fleet:
        first = await ask(fleet, "one", "/v1/responses")
        previous = first.body["id"]
        theirs = await ask(fleet, "two", "/v1/responses", input="And?", previous_response_id=previous)
        assert (theirs.status, theirs.body["error"]["param"]) == (404, "previous_response_id")
        ours = await ask(fleet, "one", "/v1/responses", input="And?", previous_response_id=previous)
        assert (ours.status, ours.route) == (200, "LOCAL")
        assert cached(ours) > 0
        assert not any(body.get("previous_response_id") for body in sent(fleet)[:-1]), "no worker was asked for theirs"


async def test_a_proxy_that_was_started_again_still_knows_whose_a_response_is(start_fleet: Any, keys: str) -> None:
    async with start_fleet("P1 D1", engine=STORES, keys_file=keys) as fleet:
        previous = (await ask(fleet, "one", "/v1/responses")).body["id"]
        for session in fleet.proxy.state.sessions.all():
            fleet.proxy.state.sessions.drop(session.id)
        continuing = {"input": "And?", "previous_response_id": previous}
        assert (await ask(fleet, "two", "/v1/responses", **continuing)).status == 404
        assert (await ask(fleet, "one", "/v1/responses", **continuing)).status == 200
