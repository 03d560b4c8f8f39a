from __future__ import annotations

from dataclasses import replace

import pytest

from ppd.proxy.errors import ConfigError
from ppd.proxy.laws.step_time import (
    FIRST_SEQUENCES,
    HOST_TOKEN_S,
    EngineProfile,
    attention_pairs,
    link_time_s,
    request_time_s,
    step_time_s,
    transfer_time_s,
)

H100 = EngineProfile()
GRID = [(new, cached) for new in (16, 64, 256, 1024) for cached in (256, 1024, 2048)]


def append_s(new: int, context: int) -> float:
    """TTFT of a lone append to a published context: half of it is the answer before, which is computed again."""
    cached = context // 2
    computed = new + context - cached
    step = step_time_s(H100, 0, 0, computed, attention_pairs(computed, cached))
    return request_time_s(H100, new + context, computed) + step


@pytest.mark.parametrize(("new", "cached"), GRID)
def test_an_append_takes_as_long_as_the_published_law_says(new: int, cached: int) -> None:
    law_s = (31.3 + 0.031 * new + 0.017 * cached) / 1000
    assert append_s(new, cached) == pytest.approx(law_s, rel=0.05)


@pytest.mark.parametrize(("new", "cached"), GRID)
def test_a_turn_through_p_takes_as_long_as_the_published_law_says(new: int, cached: int) -> None:
    law_s = (92.2 + 0.045 * new + 0.0245 * cached) / 1000
    decode_leg = (
        request_time_s(H100, new + cached, 0)
        + transfer_time_s(H100, new + cached)
        + step_time_s(H100, 1, new + cached, 0, 0)
    )
    assert append_s(new, cached) + decode_leg == pytest.approx(law_s, rel=0.1)


@pytest.mark.parametrize(("batch", "context"), [(1, 500), (16, 1000), (48, 2000), (200, 2048)])
def test_a_decode_step_takes_as_long_as_the_published_law_says(batch: int, context: int) -> None:
    law_s = (8.1 + 0.11 * batch + 0.027 * batch * context / 1000) / 1000
    assert step_time_s(H100, batch, batch * context, 0, 0) == pytest.approx(law_s)


@pytest.mark.parametrize(("new", "rate", "least", "most"), [(128, 20, 0.0, 0.05), (1024, 20, 0.25, 0.55)])
def test_appends_slow_their_decoding_neighbours_as_published(new: int, rate: int, least: float, most: float) -> None:
    stalled = rate * H100.prefill_token_s * new  # share of time spent on prompts
    assert least <= 1 / (1 - stalled) - 1 <= most


@pytest.mark.parametrize(
    ("chunk", "context", "pairs"), [(1, 0, 1), (4, 0, 10), (1, 100, 101), (10, 100, 1055), (0, 50, 0)]
)
def test_attention_pairs(chunk: int, context: int, pairs: int) -> None:
    assert attention_pairs(chunk, context) == pairs


def test_chunks_attend_as_much_as_the_whole() -> None:
    assert attention_pairs(300, 50) + attention_pairs(200, 350) == attention_pairs(500, 50)


def test_every_term_lengthens_a_step() -> None:
    base = step_time_s(H100, 0, 0, 0, 0)
    assert base == H100.step_s
    for load in [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]:
        assert step_time_s(H100, *load) > base


def test_the_first_sequences_of_a_batch_cost_more_than_the_rest() -> None:
    profile = replace(H100, first_sequence_s=1e-3)
    extra_s = [step_time_s(profile, n, 0, 0, 0) - step_time_s(H100, n, 0, 0, 0) for n in (0, 1, FIRST_SEQUENCES, 48)]
    assert extra_s == pytest.approx([0.0, 1e-3, FIRST_SEQUENCES * 1e-3, FIRST_SEQUENCES * 1e-3])


@pytest.mark.parametrize("batch", [1, 16])
def test_a_mean_context_costs_the_same_in_any_batch(batch: int) -> None:
    profile = replace(H100, mean_context_token_s=1e-6)
    extra_s = step_time_s(profile, batch, batch * 2000, 0, 0) - step_time_s(H100, batch, batch * 2000, 0, 0)
    assert extra_s == pytest.approx(2e-3)


def test_a_cached_prompt_is_read_and_no_more() -> None:
    assert request_time_s(H100, 100_000, 0) == pytest.approx(H100.request_s + 100_000 * HOST_TOKEN_S)
    assert request_time_s(H100, 100, 100) > request_time_s(H100, 100, 50) > request_time_s(H100, 100, 0)


def test_a_connector_costs_host_work_only_where_there_is_one() -> None:
    profile = replace(H100, connector_s=5e-3)
    without, with_one = (request_time_s(profile, 10, 10, has_connector=has) for has in (False, True))
    assert with_one - without == pytest.approx(5e-3)


def test_nothing_to_transfer_takes_no_time() -> None:
    assert transfer_time_s(H100, 0) == 0
    assert transfer_time_s(H100, 1) > H100.transfer_s
    assert link_time_s(H100, 0) == 0
    assert link_time_s(replace(H100, send_s=0.5), 1000) == pytest.approx(0.5 + 1000 * H100.kv_bytes_per_token / 16e9)


@pytest.mark.parametrize(
    ("field", "value"), [("step_s", -1.0), ("transfer_bytes_per_s", 0.0), ("max_batched_tokens", 0)]
)
def test_an_impossible_profile_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(H100, **{field: value})  # type: ignore[arg-type]
