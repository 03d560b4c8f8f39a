"""What some workers tell of themselves only when they are asked, over HTTP: where, and how the answer is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..fleet.worker import Worker
from . import mooncake, sglang, trtllm


class Query(NamedTuple):
    """A GET. No key is sent with it."""

    url: str
    read: Callable[[bytes], dict[str, str]]  # the coordinates in its answer; empty if it is none


def query_of(worker: Worker) -> Query | None:
    """None for a worker of which everything is known. worker: as configured, without what it once told."""
    if url := mooncake.query_url(worker):
        return Query(url, mooncake.engine_ids)
    if url := trtllm.info_url(worker):
        return Query(url, trtllm.endpoint_told)
    if url := sglang.info_url(worker):
        return Query(url, sglang.cache_told)
    return None
