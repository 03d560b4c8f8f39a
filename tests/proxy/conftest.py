"""The connections that a test asks its workers over."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ppd.proxy.upstream.client import Upstream


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    made = Upstream(keepalive_s=4.0)
    yield made
    await made.close()
