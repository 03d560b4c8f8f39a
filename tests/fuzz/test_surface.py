"""Calls made up from the published document, and every answer held against it."""

from __future__ import annotations

import asyncio
import json
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error, positive_data_acceptance, unsupported_method

from ppd.proxy.app.openapi import document
from tests.support.proxy import ADMIN_KEY
from tests.support.proxy_thread import Target

# A worker may refuse what the proxy takes, 5xx are documented answers (and 500 is checked for), and HEAD is not there.
UNCHECKED = [not_a_server_error, positive_data_acceptance, unsupported_method]


def described() -> dict[str, Any]:
    """The document, as far as a client that knows the fleet would narrow it."""
    described: dict[str, Any] = json.loads(json.dumps(document()))
    for body in ("Chat", "Completions", "Responses", "Messages"):
        properties = described["components"]["schemas"][body]["properties"]
        properties["model"] = {"enum": ["sim", "other"]}
        for cap in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"):
            if cap in properties:
                properties[cap] = {"type": "integer", "minimum": 1, "maximum": 8}
    return described


@pytest.fixture(scope="module")
def target(start_target: Callable[..., Target]) -> Target:
    return start_target("P1 D1 R1")


@pytest.fixture(scope="module")
def url(target: Target) -> Iterator[str]:
    """Leads to the proxy from a new address for each connection: the answers to an address' wrong keys are withheld."""
    hosts = (f"127.{n >> 16}.{n >> 8 & 255}.{n & 255}" for n in count(1 << 16))

    async def relay(reader: StreamReader, writer: StreamWriter) -> None:
        ahead = await asyncio.open_connection("127.0.0.1", target.port, local_addr=(next(hosts), 0))
        await asyncio.gather(copy(reader, ahead[1]), copy(ahead[0], writer))

    async def close() -> None:
        server.close()

    starting = asyncio.start_server(relay, "127.0.0.1", 0)
    server = asyncio.run_coroutine_threadsafe(starting, target.loop).result(20)
    yield "http://{}:{}".format(*server.sockets[0].getsockname())
    asyncio.run_coroutine_threadsafe(close(), target.loop).result(20)


async def copy(reader: StreamReader, writer: StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


schema = schemathesis.openapi.from_dict(described())


@schema.parametrize()  # type: ignore[untyped-decorator]
@settings(max_examples=8, deadline=None, suppress_health_check=[*HealthCheck])
def test_every_answer_is_one_that_is_published(case: schemathesis.Case[Any], target: Target, url: str) -> None:
    answer = case.call_and_validate(base_url=url, headers={"X-Admin-Key": ADMIN_KEY}, excluded_checks=UNCHECKED)
    assert answer.status_code != 500
    target.alarms.check()


@schema.include(path_regex="^/admin").parametrize()  # type: ignore[untyped-decorator]
@settings(max_examples=2, deadline=None, suppress_health_check=[*HealthCheck])
def test_nothing_under_admin_is_told_without_the_key(case: schemathesis.Case[Any], url: str) -> None:
    case.headers.pop("X-Admin-Key", None)
    for headers in ({}, {"X-Admin-Key": "guess"}, {"Authorization": "Bearer guess"}):
        assert case.call(base_url=url, headers=headers).status_code in (401, 405)
