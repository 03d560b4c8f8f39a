"""Decisions by every order: what a test says of one holds for all, unless it asks which."""

from __future__ import annotations

from functools import partial

import pytest

from ppd.proxy.config import StageOrder
from tests.support import decisions
from tests.support.decisions import Decide


@pytest.fixture(params=StageOrder)
def order(request: pytest.FixtureRequest) -> StageOrder:
    return StageOrder(request.param)


@pytest.fixture
def run(order: StageOrder) -> Decide:
    return partial(decisions.run, order=order)
