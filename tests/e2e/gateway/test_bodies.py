"""Requests' bodies over a real Envoy, held by it or streamed through the picker: large and small, with trailers."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.gateway.envoy_program import carried
from tests.support.http2_client import http2

pytestmark = pytest.mark.e2e
CHAT = "/v1/chat/completions"
JSON = ("content-type", "application/json")
MODES = pytest.mark.parametrize("streams", [False, True], ids=["held", "streamed"])


def chat(**members: object) -> bytes:
    said = [{"role": "user", "content": "Tell me of a thing that lasts for long."}]
    return json.dumps({"model": "sim", "messages": said, "max_tokens": 4, **members}).encode()


@MODES
async def test_a_turn_with_trailers_gets_its_answer(tmp_path: Path, streams: bool) -> None:
    async with carried(tmp_path, "D1", options={"streams_bodies": streams}) as (fleet, envoy):
        async with http2(int(envoy.base_url.rpartition(":")[2])) as client:

            async def asked(body: bytes, *headers: tuple[str, str]) -> tuple[int, object]:
                stream = client.open("POST", CHAT, JSON, *headers, is_whole=False)
                if body:
                    client.upload(stream, body)
                client.trail(stream, ("x-checksum", "12"))
                answer = await client.ended(stream)
                assert answer.is_ended
                return answer.status, json.loads(answer.body)

            assert (await asked(chat()))[0] == 200
            assert (await asked(b"{"))[0] == 400
            assert (await asked(b"", ("x-gateway-destination-endpoint", fleet.engines["D1"].address)))[0] == 400
            assert (await asked(chat()))[0] == 200  # the connection is still good
        assert len(fleet.engines["D1"].received) == 2
        assert fleet.engines["D1"].received[0].body == chat()
        await fleet.until(fleet.idle)


async def unsized(body: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(body), 100_000):
        yield body[at : at + 100_000]


@MODES
async def test_a_small_and_a_large_body_arrive_as_they_were_sent(tmp_path: Path, streams: bool) -> None:
    options = {"streams_bodies": streams, "sees_answers": True}
    async with carried(tmp_path, "D1", options=options) as (fleet, envoy):
        small, large = chat(), chat(user="x" * 4_000_000)
        for body, sent in ((small, io.BytesIO(small)), (large, io.BytesIO(large)), (large, unsized(large))):
            headers = dict([JSON])
            async with fleet.session.post(envoy.base_url + CHAT, data=sent, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                assert (await answer.json())["usage"]["completion_tokens"] == 4
            assert fleet.engines["D1"].received[-1].body == body
        async with fleet.session.post(envoy.base_url + CHAT, data=b"{", headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (400, "invalid_request_error")
        edited = chat(kv_transfer_params={"remote_host": "10.9.9.9"})
        async with fleet.session.post(envoy.base_url + CHAT, data=edited, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
        assert json.loads(fleet.engines["D1"].received[-1].body) == json.loads(chat())
        async with fleet.session.post(envoy.base_url + "/v1/embeddings", json={"model": "sim", "input": "x"}) as answer:
            assert answer.status == 200
        receipt = fleet.proxy.state.receipts.newest(1)[0]
        assert (receipt.outcome, receipt.counts_evidence) == ("completed", "usage")
        await fleet.until(fleet.idle)
