"""The replay of conversations that measures estimates of new tokens."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from benchmarks.small.estimates import Conversation, SimulatedCounter, conversations, replayed


class CountedByKind:
    """Four characters of text are a token, two of JSON, one and a half of Chinese; six tokens stand for a message."""

    def prompt(self, messages: Conversation) -> int:
        return 3 + sum(6 + round(self._tokens(message.get("content") or "")) for message in messages)

    def whole(self, messages: Conversation) -> int:
        return self.prompt(messages) - 3

    def _tokens(self, text: str) -> float:
        return len(text) / (1.5 if ord(text[:1] or " ") > 0x3000 else 2 if text.startswith("[") else 4)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "bfcl-multi-turn").mkdir()
    with gzip.open(tmp_path / "bfcl-multi-turn" / "user_turns.jsonl.gz", "wt") as lines:
        for task in range(12):
            texts = [f"Please look up what is known of order {task}-{number}." for number in range(4)]
            lines.write(json.dumps({"messages": [{"role": "user", "content": text} for text in texts]}) + "\n")
    return tmp_path


def test_estimates_by_kind_are_near_where_one_ratio_is_not(data: Path) -> None:
    random = Random(1)
    mixed = [(sort, one) for sort in ("json", "cjk") for one in conversations(sort, data, random)[:12]]
    found = replayed(random.sample(mixed, len(mixed)), CountedByKind(), random)
    for errors in found.values():
        by_kind, by_ratio = fmean(map(abs, errors.later)), fmean(map(abs, errors.later_by_ratio))
        assert by_kind < 0.12
        assert by_kind < by_ratio / 2


def test_every_turn_is_recognised_and_counted_as_the_simulated_engine_counts(data: Path) -> None:
    task = conversations("json", data, Random(1))[0]
    errors = replayed([("json", task)], SimulatedCounter(), Random(1))["json"]
    assert (len(errors.first), len(errors.later)) == (1, 7)
