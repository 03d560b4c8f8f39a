"""While the proxy has no file left to open, its probes tell nothing of any worker."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ppd.proxy.config import ProxyConfig
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import Role, Source, Worker
from ppd.proxy.health.probe import probing_session
from ppd.proxy.health.prober import MISSES, Prober
from ppd.proxy.runtime.tls import worker_tls
from ppd.proxy.upstream.client import Upstream


class DeafUpstream:
    """Its workers answer no turn."""

    def __init__(self) -> None:
        self.hung_up: list[str] = []

    def waits_for(self, worker: str) -> bool:
        return True

    def answers(self, worker: str) -> int:
        return 0

    def heard(self, worker: str, asked_s: float) -> None:
        pass

    def hang_up(self, worker: str, *, only_handoffs: bool) -> None:
        self.hung_up.append(worker)


@contextmanager
def no_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def healthy(request: web.Request) -> web.Response:
    return web.Response(text='{"data": [{"id": "m"}]}' if request.path == "/v1/models" else "")


async def test_no_worker_is_down_for_it_and_the_log_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    app, registry, upstream, config = web.Application(), Registry(), DeafUpstream(), ProxyConfig()
    app.router.add_get("/{path:.*}", healthy)
    async with TestServer(app) as server:
        one = Worker(role=Role.REPLICA, address=f"127.0.0.1:{server.port}", source=Source.STATIC)
        registry.add_static(one, 0.0)

        async def probed(times: int) -> None:
            """Over new connections."""
            for _ in range(times):
                prober._session = None
                await prober._look_around()
                await asyncio.gather(*prober._probing.values())
                await asyncio.sleep(0)
                await prober.close()

        prober = Prober(config, registry, cast(Upstream, upstream), lambda: 5.0, probing_session, worker_tls(config))
        await probed(1)
        with no_files():
            await probed(MISSES + 1)
            view = registry.view(one.id)
            assert view is not None and view.up and not upstream.hung_up
            prober._session = None
            prober.doubt(view)
            await asyncio.gather(*prober._probing.values())
            await prober.close()
        assert not upstream.hung_up
        told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert told == ["workers cannot be probed: this process can open no more files"]
        await probed(1)
        await server.close()
        await probed(MISSES)
        view = registry.view(one.id)
        assert view is not None and not view.up, "by now its port is closed"
