from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest


@pytest.fixture
def new_room() -> Callable[[], int]:
    return itertools.count(2**62).__next__
