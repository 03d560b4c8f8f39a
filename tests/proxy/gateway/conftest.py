from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.proxy.gateway.envoy import MADE


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    while MADE:
        proxy = MADE.pop()
        proxy.listener.close()
        await proxy.event_subscriber.close()
        if proxy.poller is not None:
            proxy.poller.close()
