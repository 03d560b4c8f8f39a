"""Where sessions go by each rule of placement."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.pages.placement import local_share, placed, unevenness
from ppd.proxy.config import Mode

FEW = 300  # sessions


def test_turns_are_even_by_load_and_kv_is_even_by_free_kv() -> None:
    by_load, by_hash, by_kv = (
        np.median(unevenness(mode, FEW), axis=1) for mode in (Mode.REPLICA, Mode.SESSION_HASH, Mode.FREE_KV)
    )
    assert by_load[0] < by_hash[0] < by_kv[0], "turns"
    assert by_kv[1] < min(by_load[1], by_hash[1]), "KV"


def test_turns_end() -> None:
    running = [sum(turns) for turns, _ in placed(Mode.REPLICA, FEW)]
    assert 20 < running[-1] < 60, "one begins each second, and lasts for 20 to 60 s"
    assert all(tokens > 0 for tokens in list(placed(Mode.REPLICA, FEW))[-1][1])


@pytest.mark.parametrize(
    ("x", "own_x", "share"), [(0.0, None, 0.0), (0.3, None, 0.3), (1.0, None, 1.0), (1.0, 0.25, 0.25)]
)
def test_a_share_of_sessions_is_local_in_fraction(x: float, own_x: float | None, share: float) -> None:
    assert local_share(x, own_x, 400) == pytest.approx(share, abs=0.07 if 0 < share < 1 else 0)
