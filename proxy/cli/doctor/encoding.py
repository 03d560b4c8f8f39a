"""Has each E of a running proxy's fleet encode a tiny image, as the proxy would, but from here."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
import zlib
from dataclasses import replace
from random import Random

import aiohttp
import msgspec

from ...fleet.worker import Role
from ...health.probe import reason_of
from .values import Encoding, Facts, WorkerFact

ENCODE_S = 30.0
SIDE = 64  # pixels: processors of some models refuse images that are smaller than a patch


async def encode(session: aiohttp.ClientSession, facts: Facts, random: Random) -> Facts:
    """Adds what became of the images."""
    asked = [fact for fact in facts.serving(Role.ENCODE) if fact.healthy and fact.worker.models]
    return replace(facts, encodings=tuple(await asyncio.gather(*(_encoded(session, fact, random) for fact in asked))))


class _Answer(msgspec.Struct):
    ec_transfer_params: dict[str, msgspec.Raw] | None = None


async def _encoded(session: aiohttp.ClientSession, fact: WorkerFact, random: Random) -> Encoding:
    worker, began_s = fact.worker, time.monotonic()
    url, body = f"{worker.base_url}/v1/chat/completions", question(worker.models[0], random)
    headers = {"Content-Type": "application/json"}
    try:
        async with (
            asyncio.timeout(ENCODE_S),
            session.post(url, data=body, headers=headers, allow_redirects=False) as answer,
        ):
            status, said = answer.status, await answer.read()
    except TimeoutError:
        return Encoding(fact.name, error=f"no answer in {ENCODE_S:g} s")
    except (aiohttp.ClientError, OSError) as exc:
        return Encoding(fact.name, error=reason_of(exc, ENCODE_S))
    tells, error = False, ""
    if status == 200:
        try:
            tells = bool(msgspec.json.decode(said, type=_Answer).ec_transfer_params)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            status, error = 0, "its 200 holds no answer of an E"
    return Encoding(fact.name, status, error, time.monotonic() - began_s, tells)


def question(model: str, random: Random) -> bytes:
    """An encoder's leg with an image that no cache holds."""
    url = "data:image/png;base64," + base64.b64encode(picture(random.randbytes(3))).decode()
    part = {"type": "image_url", "image_url": {"url": url}, "uuid": f"ppd-doctor-{random.getrandbits(64):016x}"}
    messages = [{"role": "user", "content": [part]}]
    return msgspec.json.encode({"model": model, "stream": False, "max_tokens": 1, "messages": messages})


def picture(color: bytes) -> bytes:
    """A PNG of one color."""
    lines = (b"\0" + color * SIDE) * SIDE
    size = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", size), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
