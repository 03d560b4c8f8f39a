"""The parts of a proxy that hand-overs are released with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from ppd.proxy.assembly import assemble
from ppd.proxy.config import ProxyConfig
from ppd.proxy.settings import Settings
from tests.proxy.routing.legs.release_lab import Lab


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    proxy = assemble(Settings(ProxyConfig(heartbeat_port=0)))
    async with AsyncExitStack() as stack:
        yield Lab(proxy, stack)
        await proxy.handoff_release.close()
        await proxy.upstream.close()
        proxy.listener.close()
