"""A real Envoy that lets the picker choose among some workers only: turns go there, and there alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from ppd.proxy.gateway.headers import SUBSET, SUBSET_NAMESPACE
from tests.e2e.gateway.envoy_program import asks_of_everything, carried
from tests.support.proxy import Chat

pytestmark = pytest.mark.e2e
ALLOWED = "x-allowed"  # a header of this test's, of which its Envoy makes the hint


def hinting(written: str) -> str:
    whole = yaml.safe_load(asks_of_everything(written))
    manager = whole["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    told = {"metadata_namespace": SUBSET_NAMESPACE, "key": SUBSET, "type": "STRING"}
    kind = "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config"
    config: dict[str, Any] = {
        "@type": kind,
        "request_rules": [{"header": ALLOWED, "on_header_present": told, "remove": True}],
    }
    name = "envoy.filters.http.header_to_metadata"
    manager["http_filters"].insert(0, {"name": name, "typed_config": config})
    return str(yaml.safe_dump(whole))


async def test_a_turn_goes_to_one_of_the_subset_or_nowhere(tmp_path: Path) -> None:
    async with carried(tmp_path, "D1 D2 R1", options={"edited": hinting}) as (fleet, envoy):
        address = {name: engine.address for name, engine in fleet.engines.items()}

        async def served(*allowed: str, text: str = "Where to?") -> tuple[int, str]:
            chat = Chat(envoy, headers={ALLOWED: ",".join(allowed)} if allowed else {})
            turn = await chat.say(text, max_tokens=2)
            return turn.status, turn.headers.get("x-ppd-decode", "")

        for name in ("D2", "D1", "D2"):  # the same prompt, wherever it is cached
            assert await served(address[name]) == (200, name)
        assert await served(address["R1"]) == (200, "R1")
        assert (await served("10.9.9.9:1", address["D1"])) == (200, "D1")
        assert await served("10.9.9.9:1") == (503, "")
        assert (await served())[0] == 200
        body = {"model": "sim", "input": "a text"}
        for allowed, status in ((address["D2"], 200), ("10.9.9.9:1", 503)):  # what is no turn
            async with fleet.session.post(
                f"{envoy.base_url}/v1/embeddings", json=body, headers={ALLOWED: allowed}
            ) as answer:
                assert answer.status == status, await answer.text()
        await fleet.until(fleet.idle)
