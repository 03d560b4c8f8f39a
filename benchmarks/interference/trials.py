"""The trials and their prompts. Pure: everything follows from the setting and its seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from ppd.proxy.errors import ConfigError

from .records import Experiment, Trial, TrialKind

LEAST_BLOCK = 64  # tokens; prefixes are cached in whole blocks, so a shorter context might not be cached
LOWEST_TOKEN = 16  # special tokens tend to have the lowest ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Defaults are the published program's. `sensitivity_batch`: where `contexts` and `append_sizes` are varied."""

    experiments: tuple[Experiment, ...] = (Experiment.BATCH,)
    batch_sizes: tuple[int, ...] = (1, 8, 16, 32, 64, 128, 200)
    prefills: tuple[int, ...] = (1, 2, 4)
    repeats: int = 5
    decode_context_tokens: int = 2048
    decode_new_tokens: int = 4
    output_tokens: int = 64
    new_tokens: int = 1024
    cached_tokens: int = 2048
    contexts: tuple[int, ...] = (2048, 8192, 16_384, 32_768, 65_536)
    append_sizes: tuple[int, ...] = (16, 64, 128, 256, 512, 1024)
    sensitivity_batch: int = 64
    shared_context: bool = False
    token_id_limit: int = 30_000  # ids below it are sent
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("repeats", "decode_new_tokens", "new_tokens", "sensitivity_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 1", param=name)
        for name in ("decode_context_tokens", "cached_tokens"):
            if getattr(self, name) < LEAST_BLOCK:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least {LEAST_BLOCK}", param=name)
        for name in ("batch_sizes", "prefills", "contexts", "append_sizes"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ConfigError(f"{name}: must be numbers of at least 1", param=name)
        if self.output_tokens < 2:
            raise ConfigError(f"output_tokens = {self.output_tokens}: must be at least 2", param="output_tokens")
        if self.token_id_limit <= LOWEST_TOKEN:
            raise ConfigError(
                f"token_id_limit = {self.token_id_limit}: must be above {LOWEST_TOKEN}", param="token_id_limit"
            )
        if self.shared_context and self.cached_tokens != self.decode_context_tokens:
            raise ConfigError(
                "shared_context: cached_tokens and decode_context_tokens must be equal", param="shared_context"
            )


def plan(setting: Setting) -> list[Trial]:
    """By experiment and batch, so that few contexts are cached at a time; the arms of each repeat in random order."""
    shuffle = random.Random(setting.seed).shuffle
    trials: list[Trial] = []
    for experiment in setting.experiments:
        batches = setting.batch_sizes if experiment is Experiment.BATCH else (setting.sensitivity_batch,)
        for batch in batches:
            for repeat in range(setting.repeats):
                arms = list(_arms(setting, experiment, batch, repeat))
                shuffle(arms)
                trials += arms
    return trials


def _arms(setting: Setting, experiment: Experiment, batch: int, repeat: int) -> Iterator[Trial]:
    def trial(kind: TrialKind, at: int, prefills: int = 0, new_tokens: int = 0, cached_tokens: int = 0) -> Trial:
        return Trial(
            experiment=experiment,
            kind=kind,
            at=at,
            batch=batch,
            decode_context_tokens=setting.decode_context_tokens,
            prefills=prefills,
            new_tokens=new_tokens,
            cached_tokens=cached_tokens,
            repeat=repeat,
        )

    yield trial(TrialKind.ALONE, batch)
    new, cached = setting.new_tokens, setting.cached_tokens
    match experiment:
        case Experiment.BATCH:
            for count in setting.prefills:
                yield trial(TrialKind.FULL, batch, count, new)
                yield trial(TrialKind.APPEND, batch, count, new, cached)
        case Experiment.CONTEXT:
            # Full: D has lost the context and computes it again.
            for context in setting.contexts:
                yield trial(TrialKind.FULL, context, 1, context + new)
                yield trial(TrialKind.APPEND, context, 1, new, context)
        case Experiment.APPEND:
            for size in setting.append_sizes:
                yield trial(TrialKind.FULL, size, 1, size)
                yield trial(TrialKind.APPEND, size, 1, size, cached)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids: the same context each time, and new tokens that are never repeated.

    `nonce`: of this measurement, so that its new tokens are not in the endpoint's cache from an earlier one.
    """

    setting: Setting
    nonce: str

    def decode_context(self, number: int) -> list[int]:
        label = "shared" if self.setting.shared_context else f"decode {number}"
        return self._ids(label, self.setting.decode_context_tokens)

    def prefill_context(self, number: int, tokens: int) -> list[int]:
        label = "shared" if self.setting.shared_context else f"prefill {number}"
        return self._ids(label, tokens)

    def fresh(self, trial: Trial, role: str, number: int, tokens: int) -> list[int]:
        at = f"{trial.experiment} {trial.kind} {trial.at} {trial.batch} {trial.prefills} {trial.repeat}"
        return self._ids(f"{self.nonce} {at} {role} {number}", tokens)

    def decode(self, trial: Trial, number: int) -> list[int]:
        return self.decode_context(number) + self.fresh(trial, "decode", number, self.setting.decode_new_tokens)

    def prefill(self, trial: Trial, number: int) -> list[int]:
        context = self.prefill_context(number, trial.cached_tokens) if trial.cached_tokens else []
        return context + self.fresh(trial, "prefill", number, trial.new_tokens)

    def _ids(self, label: str, tokens: int) -> list[int]:
        choices = random.Random(f"{self.setting.seed} {label}").choices
        return choices(range(LOWEST_TOKEN, self.setting.token_id_limit), k=tokens)
