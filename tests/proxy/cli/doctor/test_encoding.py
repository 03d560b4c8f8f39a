"""`ppd doctor` asks each E for a tiny image."""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ppd.proxy.cli.doctor.encoding import SIDE, encode, picture, question
from ppd.proxy.cli.doctor.fleet import encoders_encode
from ppd.proxy.cli.doctor.values import Encoding, Facts, Level, WorkerFact
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.media.picture_size import pixels
from ppd.servers.fleet.ports import free_ports
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.launch import running_engine


@pytest.mark.parametrize(
    ("one", "level", "words"),
    [
        (Encoding("E1", 200, "", 0.05, tells=True), Level.OK, "E1 encoded an image in 0.05 s, and says where"),
        (Encoding("E1", 200, "", 0.05), Level.OK, "does not say where"),
        (Encoding("E1", 401), Level.SKIP, "wants a key"),
        (Encoding("E1", 400), Level.WARN, "it answered 400"),
        (Encoding("E1", 500), Level.FAIL, "it answered 500"),
        (Encoding("E1", error="no answer in 30 s"), Level.FAIL, "no answer in 30 s"),
    ],
)
def test_what_became_of_the_image_is_told(one: Encoding, level: Level, words: str) -> None:
    (finding,) = encoders_encode(Facts(encodings=(one,)))
    assert finding.level is level and words in finding.message
    assert bool(finding.remedy) is (level in (Level.WARN, Level.FAIL))


def test_the_picture_is_a_png_of_that_size() -> None:
    png = picture(b"abc")
    assert pixels(png) == SIDE * SIDE
    at = png.index(b"IDAT")
    lines = zlib.decompress(png[at + 4 : at + 4 + int.from_bytes(png[at - 4 : at])])
    assert lines == (b"\0" + b"abc" * SIDE) * SIDE


def test_each_question_has_an_image_and_a_name_of_its_own() -> None:
    random = Random(1)
    parts = [json.loads(question("m", random))["messages"][0]["content"][0] for _ in range(2)]
    assert len({part["uuid"] for part in parts}) == len({part["image_url"]["url"] for part in parts}) == 2


def fact(address: str, *, healthy: bool = True, models: tuple[str, ...] = ("sim",)) -> WorkerFact:
    return WorkerFact(name="E1", worker=Worker(role=Role.ENCODE, address=address, models=models), healthy=healthy)


async def asked(*facts: WorkerFact) -> tuple[Encoding, ...]:
    async with aiohttp.ClientSession() as session:
        return (await encode(session, Facts(workers=facts), Random(1))).encodings


async def test_an_e_encodes_the_image() -> None:
    async with running_engine(SimConfig(role=Role.ENCODE, time_scale=0.0)) as engine:
        (one,) = await asked(
            fact(engine.address), WorkerFact(name="R1", worker=Worker(role=Role.REPLICA, address="r:1"))
        )
        assert (one.worker, one.status, one.error, one.tells) == ("E1", 200, "", True)
        assert engine.encoder.encoded == 1


async def test_an_e_that_is_unwell_or_tells_no_model_is_not_asked() -> None:
    assert await asked(fact("127.0.0.1:1", healthy=False), fact("127.0.0.1:1", models=())) == ()


@asynccontextmanager
async def answering(status: int, body: bytes) -> AsyncIterator[str]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, b"{}", (200, "", False)),
        (200, b'{"ec_transfer_params": {}}', (200, "", False)),
        (200, b"[" * 100_000, (0, "its 200 holds no answer of an E", False)),
        (200, b'{"ec_transfer_params": ', (0, "its 200 holds no answer of an E", False)),
        (302, b"", (302, "", False)),
        (503, b"no", (503, "", False)),
    ],
)
async def test_other_answers_are_no_encoding(status: int, body: bytes, expected: tuple[Any, ...]) -> None:
    async with answering(status, body) as address:
        (one,) = await asked(fact(address))
    assert (one.status, one.error, one.tells) == expected


async def test_an_e_that_is_gone_has_its_reason() -> None:
    (one,) = await asked(fact(f"127.0.0.1:{free_ports(1)[0]}"))
    assert (one.status, bool(one.error)) == (0, True)
