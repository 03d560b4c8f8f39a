"""What an engine has counted of prompts, by where their KV came from, and of blocks that it moved and evicted."""

from __future__ import annotations

import re

import aiohttp
import msgspec

from ..soak.fleet import samples

_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_OTHERS = {
    "moved_bytes": "vllm:nixl_bytes_transferred_sum",
    "evicted_blocks": "vllm:kv_block_lifetime_seconds_count",  # with --kv-cache-metrics
    "preempted": "vllm:num_preemptions_total",
}
_SOURCES = {"hit": "local_cache_hit", "computed": "local_compute", "pulled": "external_kv_transfer"}
_WANTED = re.compile("|".join((_BY_SOURCE, *_OTHERS.values())))


class EngineCounts(msgspec.Struct, frozen=True):
    """In tokens of prompts, unless the name says otherwise."""

    hit: int = 0  # found in its own cache
    pulled: int = 0  # from another engine
    computed: int = 0
    moved_bytes: int = 0  # by its pulls
    evicted_blocks: int = 0  # that could still have been hit
    preempted: int = 0  # requests

    @property
    def prompts(self) -> int:
        return self.hit + self.pulled + self.computed

    def __add__(self, other: EngineCounts) -> EngineCounts:
        return EngineCounts(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))

    def since(self, before: EngineCounts) -> EngineCounts:
        return EngineCounts(*(getattr(self, name) - getattr(before, name) for name in self.__struct_fields__))


def parse(text: str) -> EngineCounts:
    """Sums over data-parallel ranks; 0 for what the engine does not count."""
    found: dict[str, float] = {}
    for sample, value in samples(text, _WANTED).items():
        name, _, labels = sample.partition("{")
        if name == _BY_SOURCE:
            name = labels.partition('source="')[2].partition('"')[0]
        found[name] = found.get(name, 0.0) + value
    named = _SOURCES | _OTHERS
    return EngineCounts(**{field: int(found.get(name, 0.0)) for field, name in named.items()})


async def engine_counts(session: aiohttp.ClientSession, base_url: str) -> EngineCounts:
    async with session.get(f"{base_url}/metrics") as response:
        response.raise_for_status()
        return parse(await response.text())
