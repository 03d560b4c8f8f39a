"""`/metrics` of engines, as vLLM writes it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.fleet.engine_metrics import BY_SOURCE, COUNTERS, EngineMetrics, metrics_path, parse_metrics
from ppd.proxy.fleet.worker import Load

# From a decode server, vLLM 0.32.0; most labels of the cache's line left out.
DECODE = """\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79520848159e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",engine="0",kv_cache_dtype_skip_layers="[]",\
num_cpu_blocks="None",num_gpu_blocks="1024",num_gpu_blocks_override="1024"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 6687.0
vllm:prompt_tokens_created{engine="0",model_name="tiny"} 1.7952085182349916e+09
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 234.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache_hit"} 4416.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 2037.0
vllm:prompt_tokens_by_source_created{engine="0",model_name="tiny",source="local_compute"} 1.7952085182e+09
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 6687.0
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 4416.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="tiny"} 2037.0
vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="tiny"} 0.0
"""


def test_a_decode_servers_metrics_in_full() -> None:
    assert parse_metrics(DECODE) == EngineMetrics(
        load=Load(running=2, waiting=1, kv_usage=0.25, kv_capacity_tokens=32768),
        incarnation="1.79520848159e+09",
        prefix_caching=True,
        counters={
            "vllm:prompt_tokens_total": 6687,
            "local_compute": 234,
            "local_cache_hit": 4416,
            "external_kv_transfer": 2037,
            "vllm:prefix_cache_queries_total": 6687,
            "vllm:prefix_cache_hits_total": 4416,
            "vllm:external_prefix_cache_hits_total": 2037,
            "vllm:nixl_num_kv_expired_reqs_total": 0,
        },
    )


# From a decode server of SGLang with two data-parallel ranks, of which each tensor-parallel rank reports.
SGLANG = "".join(
    f"""\
sglang:num_running_reqs{{dp_rank="{dp}",model_name="tiny",tp_rank="{tp}"}} 2.0
sglang:num_queue_reqs{{dp_rank="{dp}",model_name="tiny",tp_rank="{tp}"}} 1.0
sglang:token_usage{{dp_rank="{dp}",model_name="tiny",tp_rank="{tp}"}} 0.{dp + 1}
sglang:cache_config_info{{dp_rank="{dp}",num_pages="512",page_size="64",tp_rank="{tp}"}} 1.0
"""
    for dp in range(2)
    for tp in range(2)
)


def test_sglangs_metrics() -> None:
    assert parse_metrics(SGLANG) == EngineMetrics(
        load=Load(running=4, waiting=2, kv_usage=0.2, kv_capacity_tokens=65536)
    )


# From TensorRT-LLM 1.4, by the names that its exporter gives them.
TRTLLM = "".join(
    f'trtllm_{name}{{engine_type="trtllm",model_name="tiny"}} {value}\n'
    for name, value in (
        ("num_requests_running", 2.0),
        ("num_requests_waiting", 1.0),
        ("kv_cache_utilization", 0.25),
        ("kv_cache_max_blocks", 512.0),
        ("kv_cache_tokens_per_block", 32.0),
    )
)


def test_tensorrt_llms_metrics() -> None:
    load = Load(running=2, waiting=1, kv_usage=0.25, kv_capacity_tokens=16384)
    assert parse_metrics(TRTLLM) == EngineMetrics(load)
    assert parse_metrics(TRTLLM.replace("kv_cache_max_blocks", "other")).load.kv_capacity_tokens == 0
    assert (metrics_path("trtllm"), metrics_path("vllm")) == ("/prometheus/metrics", "/metrics")


def test_data_parallel_ranks_are_summed_but_the_fullest_cache_counts() -> None:
    second = DECODE.replace('engine="0"', 'engine="1"').replace("} 0.25", "} 0.75")
    both = parse_metrics(DECODE + second)
    assert both.load == Load(running=4, waiting=2, kv_usage=0.75, kv_capacity_tokens=65536)
    assert both.counters["external_kv_transfer"] == 2 * 2037


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", EngineMetrics()),
        ("vllm:num_requests_running 3", EngineMetrics(Load(running=3))),
        ("vllm:num_requests_running NaN", EngineMetrics()),
        ("vllm:num_requests_running +Inf", EngineMetrics()),
        ("vllm:num_requests_running many", EngineMetrics()),
        ("vllm:num_requests_running{", EngineMetrics()),
        ("vllm:num_requests_running", EngineMetrics()),
        ('vllm:num_requests_running_total{engine="0"} 3', EngineMetrics()),
        ("vllm:gpu_cache_usage_perc 0.5", EngineMetrics(Load(kv_usage=0.5))),
        ("vllm:kv_cache_usage_perc 1.5", EngineMetrics(Load(kv_usage=1.0))),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1', EngineMetrics()),
        (
            'vllm:cache_config_info{enable_prefix_caching="False",num_gpu_blocks="2",block_size="16"} 1',
            EngineMetrics(Load(kv_capacity_tokens=32), prefix_caching=False),
        ),
        (
            'vllm:prompt_tokens_total{model_name="a \\"quoted\\" {name}"} 5',
            EngineMetrics(counters={"vllm:prompt_tokens_total": 5}),
        ),
        ("process_start_time_seconds 17.5", EngineMetrics(incarnation="17.5")),
    ],
)
def test_what_is_missing_or_broken_is_passed_over(text: str, expected: EngineMetrics) -> None:
    assert parse_metrics(text) == expected


names = st.sampled_from((*COUNTERS, BY_SOURCE, "vllm:num_requests_running", "vllm:cache_config_info", "x"))
lines = st.builds(lambda name, rest: name + rest, names, st.text(max_size=30))


@given(st.lists(lines).map("\n".join))
def test_no_text_breaks_it(text: str) -> None:
    load = parse_metrics(text).load
    assert 0 <= load.kv_usage <= 1
    assert load.kv_capacity_tokens >= 0


@pytest.mark.parametrize("value", ["1e308", "-1e308", "1e16", "nan", "inf"])
@pytest.mark.parametrize(
    "name", ["vllm:num_requests_running", "trtllm_kv_cache_max_blocks", "vllm:prompt_tokens_total"]
)
def test_numbers_that_no_engine_means_are_passed_over(name: str, value: str) -> None:
    lines = f'{name}{{engine="0"}} {value}\n{name}{{engine="1"}} {value}\ntrtllm_kv_cache_tokens_per_block 1e308\n'
    assert parse_metrics(lines) == EngineMetrics()


@pytest.mark.parametrize("labels", ["a", 'a="', 'a="\\"', 'a="x",', " a", "}"])
def test_a_line_that_is_sixteen_times_as_long_takes_no_hundred_times_as_long(labels: str) -> None:
    """It took 256 times as long where a word had no end, and an engine may send a line of 8 MiB."""

    def seconds(count: int) -> float:
        line, took_s = f"vllm:num_requests_running{{{labels * count}}} 1\n", []
        for _ in range(5):
            began_s = time.thread_time()
            parse_metrics(line)
            took_s.append(time.thread_time() - began_s)
        return min(took_s)

    assert seconds(16 * 1000) < 100 * seconds(1000)
