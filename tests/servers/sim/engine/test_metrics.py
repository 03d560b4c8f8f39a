from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

HI = [{"role": "user", "content": "count the tokens of this, please"}]


async def scrape(lab: Any, engine: Any) -> dict[str, float]:
    """Samples by name, with the labels that are not on all of them."""
    answer = await lab.fetch(engine, "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            extra = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            samples[sample.name + "".join(f"[{value}]" for value in extra.values())] = sample.value
    return samples


async def test_tokens_by_where_they_came_from(lab: Any) -> None:
    p, d = await lab.start("P"), await lab.start("D")
    one = await lab.split(p, d, HI, max_tokens=6)
    prompt = one.json["usage"]["prompt_tokens"]
    after_split = await scrape(lab, d)
    assert after_split["vllm:prompt_tokens_by_source_total[external_kv_transfer]"] == prompt
    assert after_split["vllm:external_prefix_cache_hits_total"] == prompt
    assert after_split["vllm:prompt_tokens_by_source_total[local_cache_hit]"] == 0
    assert after_split["vllm:generation_tokens_total"] == 6
    assert after_split["vllm:nixl_bytes_transferred_sum"] == prompt * 131_072

    second = [*HI, {"role": "assistant", "content": one.text}, {"role": "user", "content": "thanks"}]
    two = await lab.chat(d, second, max_tokens=6)
    after_local = await scrape(lab, d)
    assert after_local["vllm:prompt_tokens_by_source_total[external_kv_transfer]"] == prompt
    hits = after_local["vllm:prompt_tokens_by_source_total[local_cache_hit]"]
    assert hits == after_local["vllm:prefix_cache_hits_total"] == two.cached_tokens > 0
    computed = after_local["vllm:prompt_tokens_by_source_total[local_compute]"]
    assert computed == two.json["usage"]["prompt_tokens"] - hits
    assert after_local["vllm:prompt_tokens_total"] == prompt + two.json["usage"]["prompt_tokens"]
    assert after_local["vllm:prefix_cache_queries_total"] == after_local["vllm:prompt_tokens_total"]
    assert after_local["vllm:request_success_total[length]"] == 2
    assert after_local["vllm:time_to_first_token_seconds_count"] == 2
    assert after_local["vllm:inter_token_latency_seconds_count"] == 10
    assert after_local["vllm:e2e_request_latency_seconds_count"] == 2


async def test_load_and_capacity(lab: Any) -> None:
    r = await lab.start(num_blocks=32, max_model_len=512, max_num_seqs=1, time_scale=2.0, model="m")
    legs = [asyncio.create_task(lab.chat(r, HI, max_tokens=400, ignore_eos=True)) for _ in range(3)]
    async with asyncio.timeout(60):
        while (r.scheduler.running, r.scheduler.waiting) != (1, 2):
            await asyncio.sleep(0)
    busy = await scrape(lab, r)
    assert busy["vllm:num_requests_running"] == 1
    assert busy["vllm:num_requests_waiting"] == busy["vllm:num_requests_waiting_by_reason[capacity]"] == 2
    assert 0 < busy["vllm:kv_cache_usage_perc"] <= 1
    assert busy["vllm:cache_config_info[16][True][32]"] == 1
    assert busy["process_start_time_seconds"] > 0
    for leg in legs:
        leg.cancel()
        with suppress(asyncio.CancelledError):
            await leg
    async with asyncio.timeout(60):
        while r.counters.finished["abort"] != 3:
            await asyncio.sleep(0)
    idle = await scrape(lab, r)
    assert idle["vllm:request_success_total[abort]"] == 3
    assert (idle["vllm:num_requests_running"], idle["vllm:kv_cache_usage_perc"]) == (0, 0)


async def test_pinned_blocks_count_as_used_until_their_lease_ends(lab: Any, clock: Any) -> None:
    p = await lab.start("P", now=clock, num_blocks=64, max_model_len=1024)
    params = await lab.prefill(p, HI)
    pinned = len(params["remote_block_ids"][0])
    assert (await scrape(lab, p))["vllm:kv_cache_usage_perc"] == pinned / 64
    clock.advance(31)
    late = await scrape(lab, p)
    assert late["vllm:kv_cache_usage_perc"] == 0
    assert late["vllm:nixl_num_kv_expired_reqs_total"] == late["ppd_sim:expired_handoffs_total"] == 1


async def test_traps_are_shown(lab: Any) -> None:
    p, d = await lab.start("P"), await lab.start("D")
    params = await lab.prefill(p, HI)
    await lab.chat(d, HI, kv_transfer_params=params | {"remote_request_id": "never"})
    samples = await scrape(lab, p)
    assert samples["ppd_sim:traps_total[unknown_handoff]"] == 1
    assert samples["vllm:nixl_num_notifications_after_expiry_total"] == 1


async def test_a_failed_pull_is_counted(lab: Any) -> None:
    p, d = await lab.start("P"), await lab.start("D")
    params = await lab.prefill(p, HI)
    await lab.chat(d, HI, kv_transfer_params=params | {"remote_port": 1})
    samples = await scrape(lab, d)
    assert samples["vllm:nixl_num_failed_transfers_total"] == 1
    assert samples["vllm:request_success_total[error]"] == 1
