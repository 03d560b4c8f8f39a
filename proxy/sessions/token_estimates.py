"""Token counts without a tokenizer, estimated from each model's own `usage` so far."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

DEFAULT_BYTES_PER_TOKEN = 4.0
DEFAULT_OUTPUT_TOKENS = 256
_PRIOR_TOKENS = 256.0  # the weight of the default: a first prompt of five words must not set the ratio
_DECAY = 0.99  # per prompt: about the last hundred count
_OUTPUT_DECAY = 0.95


@dataclass(slots=True)
class _Model:
    prompt_bytes: float = DEFAULT_BYTES_PER_TOKEN * _PRIOR_TOKENS
    prompt_tokens: float = _PRIOR_TOKENS
    output_tokens: float | None = None


class TokenEstimator:
    """Bytes per token and length of answers, per model; above `capacity` the model unused for longest is forgotten."""

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._models: OrderedDict[str, _Model] = OrderedDict()

    def learn(self, model: str, prompt_bytes: int, prompt_tokens: int, completion_tokens: int | None) -> None:
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = _Model()
            if len(self._models) > self._capacity:
                self._models.popitem(last=False)
        else:
            self._models.move_to_end(model)
        if prompt_bytes > 0 and prompt_tokens > 0:
            known.prompt_bytes = known.prompt_bytes * _DECAY + prompt_bytes
            known.prompt_tokens = known.prompt_tokens * _DECAY + prompt_tokens
        if completion_tokens is not None and completion_tokens > 0:
            known.output_tokens = decayed_mean(known.output_tokens, completion_tokens, _OUTPUT_DECAY)

    def bytes_per_token(self, model: str) -> float:
        known = self._models.get(model)
        return DEFAULT_BYTES_PER_TOKEN if known is None else known.prompt_bytes / known.prompt_tokens

    def estimate(self, model: str, n_bytes: int) -> int:
        if n_bytes <= 0:
            return 0
        return max(1, round(n_bytes / self.bytes_per_token(model)))

    def expected_output(self, model: str, session_mean: float | None, cap: int | None) -> int:
        """In tokens: the session's mean, else the model's, never above the cap."""
        known = self._models.get(model)
        mean = session_mean
        if mean is None:
            mean = DEFAULT_OUTPUT_TOKENS if known is None or known.output_tokens is None else known.output_tokens
        expected = max(1, round(mean))
        return expected if cap is None else max(1, min(expected, cap))


def decayed_mean(mean: float | None, value: float, decay: float) -> float:
    return value if mean is None else mean * decay + value * (1.0 - decay)
