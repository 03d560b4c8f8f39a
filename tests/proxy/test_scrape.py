"""What is read from an engine's metrics, and what is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.scrape import parse_metrics

TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="1",num_gpu_blocks="1000"} 1.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 1054.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 64.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 64.0
process_start_time_seconds 1.76366e+09
"""


def test_ranks_are_summed_and_the_fullest_counts() -> None:
    metrics = parse_metrics(TEXT)
    assert (metrics.load.running, metrics.load.waiting, metrics.load.kv_usage) == (5, 1, 0.75)
    assert metrics.load.kv_capacity_tokens == 32_000
    assert metrics.incarnation == "1.76366e+09"
    assert metrics.prefix_caching is True
    assert metrics.counters["external_kv_transfer"] == 1054
    assert metrics.counters["vllm:prefix_cache_hits_total"] == 64


@pytest.mark.parametrize(
    "line",
    [
        "vllm:num_requests_running NaN",
        "vllm:num_requests_running +Inf",
        "vllm:num_requests_running x",
        "vllm:num_requests_running{",
        "vllm:num_requests_running",
        'vllm:cache_config_info{num_gpu_blocks="None",block_size="16"} 1.0',
        "",
    ],
)
def test_what_cannot_be_read_is_passed_over(line: str) -> None:
    load = parse_metrics(line + "\n").load
    assert (load.running, load.kv_capacity_tokens) == (0, 0)


def test_the_old_name_of_kv_usage_is_read_too() -> None:
    assert parse_metrics("vllm:gpu_cache_usage_perc 0.5\n").load.kv_usage == 0.5


@given(st.text(max_size=300))
def test_arbitrary_text_never_raises(text: str) -> None:
    assert parse_metrics(TEXT + text + "\nvllm:num_requests_running" + text).load.waiting >= 1
