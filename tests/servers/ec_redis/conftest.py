"""A Redis server for the tests of each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.ec_redis.redis_server import RedisServer


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server
