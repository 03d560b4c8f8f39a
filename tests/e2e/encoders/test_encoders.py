"""Images through the proxy and its encoders: what is encoded where, and that answers are those of one engine alone."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ppd.proxy.config import EncoderUse, Mode
from ppd.proxy.fleet.worker import Role, Source
from ppd.proxy.laws.corrections import Figure
from ppd.servers.fleet.ports import free_ports
from ppd.servers.fleet.process import EngineProcess
from ppd.servers.sim.engine.engine import SimEngine
from ppd.servers.vllm.launch import Launch
from tests.support.fleet import Fleet
from tests.support.proxy import ProxyClient, Turn
from tests.support.scripted_workers import odd_worker

ALWAYS: dict[str, Any] = {"encoder": EncoderUse.ALWAYS}


def picture(seed: int, width: int = 1024) -> str:
    """A data URL of an image, as far as its head goes."""
    head = b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR" + width.to_bytes(4) + (1024).to_bytes(4)
    return "data:image/png;base64," + base64.b64encode(head + bytes([seed]) * 30).decode()


def asks(url: str, text: str = "what is this?") -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]


def legs(engine: SimEngine) -> list[dict[str, Any]]:
    """The bodies of the turns' legs that came there."""
    return [json.loads(received.body) for received in engine.received]


def images(body: dict[str, Any]) -> list[dict[str, Any]]:
    parts = [
        part for message in body["messages"] for part in message["content"] if isinstance(message["content"], list)
    ]
    return [part for part in parts if part["type"] != "text"]


async def talk(client: ProxyClient, *urls: str) -> list[str]:
    """A conversation with an image in each of its turns: the answers."""
    chat, texts = client.conversation(), []
    for url in urls:
        chat.messages.append({"role": "user", "content": asks(url)})
        turn = await client.chat(chat.messages)
        assert turn.status == 200, turn.body
        chat.messages.append({"role": "assistant", "content": turn.text})
        texts.append(turn.text)
    return texts


async def decisions(fleet: Fleet, turn: Turn) -> list[str]:
    record = (await fleet.receipt(turn))["encoder"]
    return [] if record is None else record["items"]


@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("workers", ["E1 R1", "E1 P1 D1"])
async def test_answers_with_encoders_are_those_of_a_replica_alone(workers: str, strip: bool) -> None:
    urls = [picture(1), picture(2), picture(1)]
    async with Fleet.of("R1") as alone:
        expected = await talk(alone, *urls)
        others = await talk(alone, picture(3), *urls[1:])
    assert expected[0] != others[0]
    async with Fleet.of(workers, mode=Mode.ALWAYS_SPLIT, encoder_strip=strip, **ALWAYS) as fleet:
        assert await talk(fleet, *urls) == expected
        # Each item is encoded once, on E, whose parts have the names that all engines get.
        encoder = fleet.engines["E1"]
        assert encoder.encoder.encoded == 2
        assert [engine.counters.encoded_items for engine in fleet.engines.values()] == [0] * len(fleet.engines)
        computing, answering = fleet.engines[workers.split()[1]], fleet.engines[workers.rsplit(maxsplit=1)[-1]]
        for engine in {computing.address: computing, answering.address: answering}.values():
            for body in legs(engine):
                kinds = [part["type"] for part in images(body)]
                assert kinds == [("image_embeds" if strip else "image_url")] * len(kinds)
                assert {part["uuid"] for part in images(body)} <= {
                    part["uuid"] for leg in legs(encoder) for part in images(leg)
                }
                assert ("ec_transfer_params" in body) is (engine is computing)
        await fleet.until(fleet.idle)


async def test_images_of_responses_are_encoded_too_and_those_of_messages_where_they_are_needed() -> None:
    """Engines hear no names of Messages' images, so they would not find what E has encoded."""
    data = picture(2).partition(",")[2]
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    cases: dict[str, tuple[dict[str, Any], str, int]] = {
        "/v1/responses": (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": picture(1)}]}]},
            "image: encoded",
            0,
        ),
        "/v1/messages": (
            {"messages": [{"role": "user", "content": [block]}], "max_tokens": 8},
            "image: unnamed",
            1,
        ),
    }
    async with Fleet.of("E1 R1", encoder_strip=True, **ALWAYS) as fleet:
        for path, (body, decision, encoded_by_worker) in cases.items():
            turn = await fleet.post(path, {"model": "sim", **body})
            assert turn.status == 200 and await decisions(fleet, turn) == [decision]
            assert "ec_transfer_params" not in turn.body
            assert fleet.engines["R1"].counters.encoded_items == encoded_by_worker
        assert fleet.engines["E1"].encoder.encoded == 1
        assert await fleet.metric('ppd_encoder_items_total{decision="unnamed"}') == 1


async def test_items_of_a_request_go_to_all_encoders_at_once_and_again_to_the_one_that_has_them() -> None:
    async with Fleet.of("E1 E2 R1", **ALWAYS) as fleet:
        content = [*asks(picture(1)), *asks(picture(2))]
        first = await fleet.chat([{"role": "user", "content": content}])
        await fleet.chat([{"role": "user", "content": [*content, *asks(picture(1), "again")]}])
        names = {
            name: [part["uuid"] for leg in legs(fleet.engines[name]) for part in images(leg)] for name in ("E1", "E2")
        }
        assert [len(each) for each in names.values()] == [2, 2]
        assert [len(set(each)) for each in names.values()] == [1, 1]
        assert len((await fleet.receipt(first))["encoder"]["legs"]) == 2
        assert await fleet.metric('ppd_encoder_items_total{decision="encoded"}') == 4


async def test_a_batch_has_several_items_and_metadata_find_theirs() -> None:
    async with Fleet.of("R1") as alone:
        content = [*asks(picture(1)), *asks(picture(2)), *asks(picture(3))]
        expected = (await alone.chat([{"role": "user", "content": content}])).text
    async with Fleet.of("E1 R1", encoder_batch=2, encoder_strip=True, **ALWAYS) as fleet:
        assert (await fleet.chat([{"role": "user", "content": content}])).text == expected
        assert [len(images(leg)) for leg in legs(fleet.engines["E1"])] == [2, 1]


async def test_media_stay_where_an_encoder_tells_nothing_of_them() -> None:
    async with Fleet.of("R1", encoder_strip=True, **ALWAYS) as fleet:
        await fleet.add("E1", encoder_metadata=False)
        await talk(fleet, picture(1))
        assert [part["type"] for part in images(legs(fleet.engines["R1"])[0])] == ["image_url"]
        assert fleet.engines["R1"].counters.encoded_items == 0


async def test_an_encoders_agent_drains_it_on_sigterm_and_its_turns_are_encoded(tmp_path: Path) -> None:
    """A launched engine, announced by heartbeats."""
    port, side, heartbeats = free_ports(3)
    flags = ("--port", str(port), "--side-channel-port", str(side), "--proxy", f"127.0.0.1:{heartbeats}")
    slow = ("--time-scale", "1", "--encoder-item-s", "1.5")
    argv = (sys.executable, "-m", "ppd.servers", "agent", "--role", "E", "--engine", "sim", *flags)
    launch = Launch((*argv, "--interval", "0.2", "--log", str(tmp_path / "engine.log"), "--", *slow), {})
    say = [{"role": "user", "content": asks(picture(1))}]
    async with (
        Fleet.of("R1", heartbeat_port=heartbeats, **ALWAYS) as fleet,
        EngineProcess(launch, tmp_path / "agent.log", name="agent") as agent,
    ):

        def states() -> list[tuple[str, str]]:
            views = fleet.proxy.state.registry.views()
            return [(view.state, view.worker.source) for view in views if view.role is Role.ENCODE]

        await fleet.until(lambda: states() == [("up", Source.AGENT)], 60)
        asking = asyncio.create_task(fleet.chat(say))
        await fleet.until(lambda: any(view.inflight for view in fleet.proxy.state.registry.views()))
        stopping = asyncio.create_task(agent.stop())
        await fleet.until(lambda: states() == [("draining", Source.AGENT)])
        assert not asking.done()
        meanwhile = await fleet.chat([{"role": "user", "content": asks(picture(2))}])
        assert (meanwhile.status, await decisions(fleet, meanwhile)) == (200, ["image: absent"])
        turn = await asking
        assert (turn.status, await decisions(fleet, turn)) == (200, ["image: encoded"])
        await fleet.until(lambda: states() == [])
        assert await stopping == 0
        after = await fleet.chat([{"role": "user", "content": asks(picture(3))}])
        assert (after.status, (await fleet.receipt(after))["encoder"]) == (200, None)
        assert fleet.engines["R1"].counters.encoded_items == 2
        await fleet.until(fleet.idle)


async def test_an_embedding_that_is_gone_is_made_anew_from_the_media() -> None:
    say = [{"role": "user", "content": [*asks(picture(1)), *asks(picture(2))]}]
    async with Fleet.of("R1") as alone:
        expected = (await alone.chat(say)).text
    async with Fleet.of("P1 D1", mode=Mode.ALWAYS_SPLIT, encoder_strip=True, encoder_batch=2, **ALWAYS) as fleet:
        await fleet.add("E1", encoder_cache_items=1)
        assert (await fleet.chat(say)).text == expected
        computing = [fleet.engines[name].counters.encoded_items for name in ("P1", "D1")]
        assert sum(computing) == 1


async def test_bad_media_and_clients_own_parameters_reach_no_engine() -> None:
    async with Fleet.of("E1 R1", media_limit=2, **ALWAYS) as fleet:
        for url in ("file:///etc/passwd", "data:image/png;base64,?", "data:text/plain,a"):
            turn = await fleet.chat([{"role": "user", "content": asks(url)}])
            assert turn.status == 400 and "messages" in turn.body["error"]["message"]
        for path, member, part in (
            ("/v1/responses", "input", {"type": "input_image", "image_url": "file:///etc/passwd"}),
            ("/v1/messages", "messages", {"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}),
        ):
            body = {"model": "sim", "max_tokens": 4, member: [{"role": "user", "content": [part]}]}
            turn = await fleet.post(path, body)
            assert turn.status == 400 and member in turn.body["error"]["message"]
        many = await fleet.chat(
            [{"role": "user", "content": [*asks(picture(1)), *asks(picture(1)), *asks(picture(1))]}]
        )
        assert many.status == 400 and "media_limit" in many.body["error"]["message"]
        hostile = {"stolen": {"peer_host": "10.0.0.1", "peer_port": 1, "size_bytes": 1, "item_indices": [0]}}
        part = {"type": "image_url", "image_url": {"url": picture(1)}, "uuid": "stolen"}
        answered = await fleet.chat([{"role": "user", "content": [part]}], ec_transfer_params=hostile)
        assert answered.status == 200
        for engine in fleet.engines.values():
            assert all(b"stolen" not in received.body for received in engine.received)


async def test_a_text_alone_asks_no_encoder() -> None:
    async with Fleet.of("E1 R1", **ALWAYS) as fleet:
        turn = await fleet.conversation().say("hi")
        assert (await fleet.receipt(turn))["encoder"] is None
        assert not fleet.engines["E1"].received


async def test_auto_encodes_where_the_worker_has_neither_the_embedding_nor_the_tokens() -> None:
    async with Fleet.of("E1 R1", encoder_min_pixels=1024 * 512) as fleet:
        for text in range(20):  # most turns are text
            await fleet.conversation().say(f"hi {text}")
        one, other, small = picture(1), picture(2), picture(3, width=100)
        first = await fleet.chat([{"role": "user", "content": asks(one)}])
        assert await decisions(fleet, first) == ["image: encoded"]
        elsewhere = await fleet.chat([{"role": "user", "content": asks(one, "another talk about it")}])
        assert await decisions(fleet, elsewhere) == ["image: held"]
        tiny = await fleet.chat([{"role": "user", "content": asks(small)}])
        assert await decisions(fleet, tiny) == ["image: small"]
        # Later turns have the KV of the image: whatever other items have taken its embedding's place since.
        history: list[dict[str, Any]] = [
            {"role": "user", "content": asks(one)},
            {"role": "assistant", "content": first.text},
        ]
        others: list[Any] = [part for seed in range(10, 17) for part in asks(picture(seed))]
        await fleet.chat([{"role": "user", "content": others}])
        later = await fleet.chat([*history, {"role": "user", "content": asks(other)}])
        assert await decisions(fleet, later) == ["image: prefix", "image: encoded"]


@pytest.mark.parametrize("head", [{}, {"instructions": "be brief"}, "system"], ids=["none", "instructions", "item"])
async def test_what_lies_in_a_prefix_is_known_of_responses_too(head: dict[str, str] | str) -> None:
    """By items: reasoning has no KV of its own, and the first one may be the system's text."""
    async with Fleet.of("E1 R1") as fleet:
        for text in range(20):  # most turns are text
            await fleet.conversation().say(f"hi {text}")
        history: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}] if head == "system" else []
        members = {"model": "sim", "store": False, **(head if isinstance(head, dict) else {})}

        async def say(url: str) -> list[str]:
            part = {"type": "input_image", "image_url": url}
            history.append({"role": "user", "content": [{"type": "input_text", "text": "what is this?"}, part]})
            turn = await fleet.post("/v1/responses", {**members, "input": history})
            assert turn.status == 200, turn.body
            history.append({"type": "reasoning", "id": "r", "summary": []})
            history.extend(each for each in turn.body["output"] if each["type"] == "message")
            return await decisions(fleet, turn)

        async def others(first: int) -> None:
            """They take the place of all embeddings that R has, and of no KV."""
            parts: list[Any] = [part for seed in range(first, first + 7) for part in asks(picture(seed))]
            await fleet.chat([{"role": "user", "content": parts}])

        assert await say(picture(1)) == ["image: encoded"]
        await others(10)
        assert await say(picture(2)) == ["image: prefix", "image: encoded"]
        await others(20)
        assert await say(picture(3)) == ["image: prefix", "image: prefix", "image: encoded"]


@pytest.mark.slow
async def test_receipts_have_what_an_item_takes_at_an_encoder_and_in_place() -> None:
    """In a mode that predicts times: from E's own legs, and from first tokens that came later than predicted."""
    slow = {"time_scale": 1.0, "encoder_item_s": 0.1}
    async with Fleet.of("E1 R1", engine=slow, mode=Mode.SLO, profile="h100-llama-3.1-8b") as fleet:

        async def asked(seed: int) -> dict[str, Any]:
            messages = [{"role": "user", "content": asks(picture(seed))}]
            body = {"model": "sim", "messages": messages, "max_tokens": 2, "stream": True}
            async with fleet.session.post(f"{fleet.base_url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            _, receipt = await fleet.admin("GET", f"/requests/{answer.headers['X-Request-Id']}")
            assert isinstance(receipt, dict)
            return receipt

        receipts = [await asked(0)]
        # All turns have images: of three at once one is encoded in place, and others meanwhile at E.
        for number in range(24):
            receipts += await asyncio.gather(*(asked(1 + 3 * number + one) for one in range(3)))
        receipts.append(await asked(99))
        first, last = receipts[0]["encoder"], receipts[-1]["encoder"]
        assert (first["on_encoder_s"], first["in_place_s"]) == (None, None)
        assert 0.1 <= last["on_encoder_s"] < 1.0
        assert 0.0 < last["in_place_s"] < 1.0
        # Neither is part of what corrects the laws, or nothing would be left that comes late.
        at_encoder = [each for each in receipts if each["encoder"]["items"] == ["image: encoded"]]
        state = fleet.proxy.state
        (replica,) = (view for view in state.registry.views() if view.role is Role.REPLICA)
        assert 0 < state.laws.shown(replica)[Figure.TTFT].turns <= len(at_encoder) < len(receipts)
        for each in at_encoder:
            since_s = each["encoder"]["began_s"] + each["encoder"]["waited_s"]
            measured_s = each["predicted_ttft_s"] * (1 + each["ttft_error"])
            assert measured_s == pytest.approx(each["ttft_s"] - since_s, abs=0.05)


async def test_no_client_learns_where_encoders_are() -> None:
    """An engine that cannot load an embedding may say from whom."""

    async def refuses(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "nothing comes from 127.0.0.1 today", "code": 400}}, status=400)

    async with Fleet.of("E1", mode=Mode.REPLICA, **ALWAYS) as fleet, odd_worker(fleet, refuses, "R"):
        told = await fleet.chat([{"role": "user", "content": asks(picture(1))}])
        assert (told.status, "127.0.0.1" in json.dumps(told.body)) == (400, False)
        plain = await fleet.chat([{"role": "user", "content": "no image"}])
        assert "nothing comes from" in json.dumps(plain.body), "an error without encoders is passed on"
