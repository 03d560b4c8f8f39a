from __future__ import annotations

from typing import Any

import pytest

from benchmarks.interference.records import Experiment, TrialKind
from benchmarks.interference.trials import LOWEST_TOKEN, Prompts, Setting, plan
from ppd.proxy.errors import ConfigError

SMALL = Setting(
    experiments=tuple(Experiment),
    batch_sizes=(1, 4),
    prefills=(1, 2),
    repeats=3,
    new_tokens=100,
    cached_tokens=128,
    decode_context_tokens=128,
    contexts=(128, 256),
    append_sizes=(16, 64),
    sensitivity_batch=8,
)


def test_every_arm_is_repeated() -> None:
    trials = plan(SMALL)
    # Two batches of (alone, 2 x full and append), a context and an append size experiment of the same size each.
    assert len(trials) == 3 * (2 * 5 + 5 + 5)
    assert len({str(trial) for trial in trials}) == len(trials)


def test_a_batch_is_finished_before_the_next_begins() -> None:
    batches = [trial.batch for trial in plan(SMALL) if trial.experiment is Experiment.BATCH]
    assert batches == sorted(batches)


def test_the_order_of_arms_follows_from_the_seed() -> None:
    other = plan(Setting(batch_sizes=(4,), seed=1))
    assert plan(Setting(batch_sizes=(4,))) == plan(Setting(batch_sizes=(4,)))
    assert plan(Setting(batch_sizes=(4,))) != other
    first = {repeat: next(t.kind for t in other if t.repeat == repeat) for repeat in range(5)}
    assert len(set(first.values())) > 1


def test_a_full_prefill_computes_the_context_that_an_append_has_cached() -> None:
    arms = {(t.kind, t.at): t for t in plan(SMALL) if t.experiment is Experiment.CONTEXT}
    full, append = arms[TrialKind.FULL, 256], arms[TrialKind.APPEND, 256]
    assert (full.new_tokens, full.cached_tokens) == (356, 0)
    assert (append.new_tokens, append.cached_tokens) == (100, 256)


def test_both_arms_of_another_experiment_compute_as_many_tokens() -> None:
    for trial in plan(SMALL):
        if trial.kind is not TrialKind.ALONE and trial.experiment is not Experiment.CONTEXT:
            assert trial.new_tokens == (100 if trial.experiment is Experiment.BATCH else trial.at)


@pytest.mark.parametrize("shared", [False, True])
def test_prompts_have_the_lengths_that_were_asked_for(shared: bool) -> None:
    setting = Setting(cached_tokens=128, decode_context_tokens=128, new_tokens=100, shared_context=shared)
    prompts = Prompts(setting, "a")
    for trial in plan(setting)[:7]:
        assert len(prompts.decode(trial, 0)) == 128 + 4
        if trial.prefills:
            assert len(prompts.prefill(trial, 0)) == trial.cached_tokens + trial.new_tokens


def test_only_contexts_come_again() -> None:
    prompts, trials = Prompts(SMALL, "a"), plan(SMALL)
    appends = [trial for trial in trials if trial.kind is TrialKind.APPEND]
    assert prompts.prefill(appends[0], 0)[:128] == prompts.prefill(appends[1], 0)[:128]
    tails = {tuple(prompts.prefill(trial, n)[trial.cached_tokens :]) for trial in appends for n in (0, 1)}
    assert len(tails) == 2 * len(appends)
    assert prompts.decode_context(0) != prompts.decode_context(1)
    assert prompts.decode(trials[0], 0)[128:] != prompts.decode(trials[1], 0)[128:]


def test_a_second_run_has_no_prompt_of_the_first_but_the_same_contexts() -> None:
    one, other = Prompts(SMALL, "a"), Prompts(SMALL, "b")
    full, append = (
        next(trial for trial in plan(SMALL) if trial.kind is kind) for kind in (TrialKind.FULL, TrialKind.APPEND)
    )
    assert one.prefill(full, 0) != other.prefill(full, 0)
    assert one.decode(full, 0)[128:] != other.decode(full, 0)[128:]
    assert one.prefill(append, 0)[:128] == other.prefill(append, 0)[:128]
    assert one.prefill(append, 0)[128:] != other.prefill(append, 0)[128:]


def test_a_shared_context_is_everyones() -> None:
    prompts = Prompts(Setting(shared_context=True), "a")
    assert prompts.decode_context(0) == prompts.decode_context(7) == prompts.prefill_context(3, 2048)


def test_ids_stay_in_the_range_that_was_asked_for() -> None:
    ids = Prompts(Setting(token_id_limit=300), "a").decode_context(0)
    assert LOWEST_TOKEN <= min(ids) <= max(ids) < 300


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"repeats": 0}, "repeats = 0: must be at least 1"),
        ({"prefills": ()}, "prefills: must be numbers"),
        ({"batch_sizes": (0,)}, "batch_sizes: must be numbers"),
        ({"output_tokens": 1}, "output_tokens = 1"),
        ({"cached_tokens": 10}, "cached_tokens = 10: must be at least 64"),
        ({"token_id_limit": 16}, "token_id_limit = 16: must be above 16"),
        ({"shared_context": True, "cached_tokens": 4096}, "must be equal"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Setting(**settings)
