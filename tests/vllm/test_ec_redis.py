"""An encoder (E) and an engine (PD) of real vLLM with an encoder cache over a real Redis server between them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import struct
import subprocess
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import redis

from ppd.proxy.config import EncoderUse, Mode
from ppd.proxy.fleet.worker import Role
from ppd.servers.fleet.ports import free_ports
from ppd.servers.fleet.process import EngineProcess
from ppd.servers.vllm.cpu_install import Environment, ensure, unsupported_reason
from ppd.servers.vllm.encoder_parts import ensure_parts
from ppd.servers.vllm.launch import TINY_ARGS, TINY_NAME, EngineSpec, Launch, command
from ppd.servers.vllm.tiny_llava import ensure_llava
from tests.servers.ec_redis.redis_server import RedisServer
from tests.support.proxy import ProxyClient, running_proxy
from tests.vllm.nursery.launches import Born

in_session = pytest.mark.asyncio(loop_scope="session")

QUESTION = {"type": "text", "text": "What is this? Tell me more of it."}
START_S = 600.0
WORKER_APART = ("--distributed-executor-backend", "mp")  # a process of its own, as with several GPUs
WAIT_S = 5.0  # redis_timeout_s: within it, an embedding comes on a busy machine too


@dataclass
class Pair:
    session: aiohttp.ClientSession
    urls: dict[str, str]
    encoder: EngineProcess
    server: RedisServer

    async def encode(self, seed: int, name: str, **body: Any) -> dict[str, Any]:
        """E's leg: what it says of the image."""
        told: dict[str, Any] = (await self.post("E", [image(seed, name)], **body))["ec_transfer_params"]
        return told

    async def answer(self, seed: int, name: str, told: dict[str, Any] | None = None) -> str:
        """PD's text about the image, with E's embedding of it or without."""
        body = {} if told is None else {"ec_transfer_params": told}
        answered = await self.post("PD", [image(seed, name), QUESTION], **body)
        text: str = answered["choices"][0]["message"]["content"]
        return text

    def stop_encoder(self) -> None:
        """It lives, and does nothing any more."""
        assert self.encoder._process is not None
        guard = self.encoder._process.pid
        [program] = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
        os.killpg(int(program), signal.SIGSTOP)

    async def post(self, engine: str, content: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
        asked = {"model": TINY_NAME, "max_tokens": 24, "temperature": 0, **body}
        asked["messages"] = [{"role": "user", "content": content}]
        async with self.session.post(f"{self.urls[engine]}/v1/chat/completions", json=asked) as response:
            assert response.status == 200, await response.text()
            answered: dict[str, Any] = await response.json()
            return answered


def pushes(redis_url: str) -> int:
    """Messages that were ever sent through Redis."""
    with redis.Redis.from_url(redis_url) as raw:
        counted: dict[str, Any] = raw.info("commandstats")
    return int(counted.get("cmdstat_rpush", {"calls": 0})["calls"])


def redis_cache(redis_url: str, **settings: Any) -> dict[str, Any]:
    """What `--ec-transfer-config` says of it."""
    return {
        "ec_connector": "RedisECConnector",
        "ec_connector_module_path": "ppd_ec_redis.connector",
        "ec_connector_extra_config": {"redis_url": redis_url, "redis_timeout_s": WAIT_S, **settings},
    }


def image(seed: int, name: str) -> dict[str, Any]:
    """A PNG of 56 pixels a side, as part of a message; vLLM knows it by the name."""
    side = range(56)
    rows = b"".join(
        b"\0" + bytes(value % 256 for x in side for value in (x * seed + y * 3, y * seed + x, x * y + seed))
        for y in side
    )
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 56, 56, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}, "uuid": name}


def engine(
    name: str, ec_role: str, args: tuple[str, ...], redis_url: str, environment: Environment, parts: Path
) -> tuple[str, Launch]:
    transfer = {"ec_role": ec_role, **redis_cache(redis_url, name=name)}
    [port] = free_ports(1)
    spec = EngineSpec(
        role=Role.REPLICA,
        model=str(ensure_llava(environment)),
        served_model_name=TINY_NAME,
        port=port,
        connector="none",
        device="cpu",
        extra_args=(*TINY_ARGS, *args, "--ec-transfer-config", json.dumps(transfer)),
        python=str(environment.python),
    )
    launch = command(spec)
    return f"http://{spec.address}", Launch(launch.argv, launch.env | {"PYTHONPATH": str(parts)})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(born: Born, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    if reason := unsupported_reason():
        pytest.skip(f"real vLLM is not tested here: {reason}")
    environment = ensure(print)
    parts = ensure_parts(environment, print)
    folder = tmp_path_factory.mktemp("encoders")
    urls, processes = {}, {}
    async with AsyncExitStack() as stack:
        server = stack.enter_context(RedisServer(folder))
        for name, ec_role, args in (("E1", "ec_producer", ()), ("PD1", "ec_consumer", WORKER_APART)):
            short = name.rstrip("1")
            urls[short], launch = engine(name, ec_role, args, server.url, environment, parts)
            launch = launch if short == "E" else born(launch)  # E's own process is to be stopped
            process = EngineProcess(launch, folder / f"{name}.log", name=name)
            processes[short] = await stack.enter_async_context(process)
        await asyncio.gather(*(processes[name].wait_healthy(urls[name], timeout_s=START_S) for name in urls))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Pair(session, urls, processes["E"], server)


@in_session
async def test_an_engine_says_the_same_with_an_encoder_as_without(pair: Pair) -> None:
    alone = await pair.answer(3, "alone-3")
    told = await pair.encode(3, "shared-3")
    assert await pair.answer(3, "shared-3", told) == alone
    assert await pair.answer(4, "alone-4") != alone, "another image, another text"


@in_session
async def test_the_embedding_is_the_encoders(pair: Pair) -> None:
    """PD gets another image under the name, and tells of the one that E encoded."""
    told = await pair.encode(5, "swapped")
    assert await pair.answer(6, "swapped", told) == await pair.answer(5, "alone-5")


@in_session
async def test_both_legs_may_go_at_once_if_the_encoder_is_told_for_whom(pair: Pair) -> None:
    awaits = {"at once": {"offer": None}}
    text, _ = await asyncio.gather(
        pair.answer(11, "at once", awaits), pair.encode(10, "at once", ec_transfer_params={"consumer": "PD1"})
    )
    assert text == await pair.answer(10, "alone-10"), "the encoder's image"


@in_session
async def test_a_later_turn_needs_no_embedding(pair: Pair) -> None:
    """The tokens of the image are in PD's KV cache."""
    first = await pair.answer(12, "again", await pair.encode(12, "again"))
    assert await pair.answer(13, "again", await pair.encode(12, "again")) == first


@in_session
async def test_the_proxy_has_the_encoder_encode_before_the_turn(pair: Pair) -> None:
    """It names the image itself, so the engine cannot know it yet; the text is the one without any encoder."""
    workers = tuple(f"{role}={pair.urls[name].removeprefix('http://')}" for role, name in (("E", "E"), ("R", "PD")))
    settings: dict[str, Any] = {"mode": Mode.REPLICA, "encoder": EncoderUse.ALWAYS, "probe_interval_s": 0.5}
    async with running_proxy(workers=workers, **settings) as running:
        client = ProxyClient(*running, TINY_NAME)
        await client.until(lambda: list(client.states().values()) == ["up", "up"], 60)
        before, texts = pushes(pair.server.url), []
        for seed in (20, 21, 20):
            turn = await client.chat(
                [{"role": "user", "content": [image(seed, "the client's"), QUESTION]}], max_tokens=24
            )
            assert turn.status == 200, turn.body
            found = (await client.receipt(turn))["encoder"]
            assert (found["items"], [leg["error"] for leg in found["legs"]]) == (["image: encoded"], [None])
            texts.append(turn.text)
    assert texts == [await pair.answer(seed, f"alone-{seed}") for seed in (20, 21, 20)]
    assert len(set(texts)) == 2, "another image, another text"
    assert pushes(pair.server.url) > before, "embeddings were sent"


OFFER = {"producer": "E1", "leg": "x", "item": "odd", "embedding": {"shape": [16, 128], "dtype": "F32"}}


@in_session
@pytest.mark.parametrize(
    "said",
    [7, {"offer": OFFER | {"embedding": {"shape": [16, 256], "dtype": "F32"}}}],
)
async def test_engines_live_on_after_what_no_producer_says(pair: Pair, said: object) -> None:
    assert await pair.encode(14, "odd", ec_transfer_params={"consumer": said})
    assert await pair.answer(14, "odd", {"odd": said}) == await pair.answer(14, "alone-14")


@in_session
@pytest.mark.parametrize("engine", ["E", "PD"])
async def test_parameters_that_are_no_object_are_none(pair: Pair, engine: str) -> None:
    """So they come past vLLM's own check."""
    assert await pair.post(engine, [image(15, "past"), QUESTION], vllm_xargs={"ec_transfer_params": "x"})


@in_session
async def test_what_was_sent_once_is_encoded_here_the_next_time(pair: Pair) -> None:
    """The proxy sends E's word to a second engine, or again after this one has forgotten: E withdraws it."""
    told = await pair.encode(7, "once")
    for item in told.values():
        item["offer"]["leg"] = "an older one"
    assert await pair.answer(7, "once", told) == await pair.answer(7, "alone-7")


@in_session
async def test_nothing_hangs_when_the_encoder_dies_between_grant_and_data(pair: Pair) -> None:
    told = await pair.encode(8, "lost")
    pair.stop_encoder()
    before = pushes(pair.server.url)
    answer = asyncio.create_task(pair.answer(8, "lost", told))
    async with asyncio.timeout(60):
        while pushes(pair.server.url) == before:
            await asyncio.sleep(0.01)
    await pair.encoder.kill()
    assert await answer == await pair.answer(8, "alone-8")


@in_session
async def test_nothing_hangs_without_redis(pair: Pair) -> None:
    pair.server.kill()
    told = {"gone": {"offer": OFFER | {"item": "gone"}}}
    assert await pair.answer(9, "gone", told) == await pair.answer(9, "alone-9")


INTEROPERATES = """
import sys, torch, safetensors.torch
from ppd_ec_redis.wire import Data, decode_data, encode_data
from ppd_ec_redis.reservations import Embedding, Key
tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
rows = tensor.view(torch.uint8).numpy().tobytes()
file = encode_data(Data(Key("leg", "a"), Embedding((2, 3), "BF16"), rows))
assert torch.equal(safetensors.torch.load(file)["ec_cache"], tensor)
theirs = safetensors.torch.save({"ec_cache": tensor}, {"version": "1", "leg": "leg", "item": "a"})
assert decode_data(theirs, 100).rows == rows
"""


def test_data_are_what_the_safetensors_library_reads_and_writes() -> None:
    if reason := unsupported_reason():
        pytest.skip(f"vLLM is not installed here: {reason}")
    environment = ensure(print)
    path = {"PYTHONPATH": str(ensure_parts(environment, print))}
    subprocess.run([str(environment.python), "-c", INTEROPERATES], env=os.environ | path, check=True)
