"""Ids and times of requests."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime, timedelta

from ppd.proxy.telemetry.receipts import new_id, now_text


def test_ids_differ_also_after_a_fork() -> None:
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, new_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100).decode() != new_id()


def test_the_time_is_as_iso_8601_has_it() -> None:
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    text = now_text()
    assert before <= datetime.fromisoformat(text) <= datetime.now(UTC)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", text)
