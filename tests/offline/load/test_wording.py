from __future__ import annotations

import pytest

from ppd.offline.load.wording import LIMIT, short

PROMPT = "So bgcdf hjklm npqrs tvwxz and more that nobody else may see"
IDS = "1204, 1377, 1999, 1020, 1533"


@pytest.mark.parametrize(
    ("message", "prompt", "shown"),
    [
        ("out of blocks", PROMPT, "out of blocks"),
        ("two\n  lines", PROMPT, "two lines"),
        ("bad input: 'hjklm npqrs tvwxz and' is odd", PROMPT, "bad input: '[...]"),
        ("bad input: So  bgcdf\nhjklm npqrs", PROMPT, "bad input: [...]"),
        ("bad ids [1377, 1999, 1020, 1533]", IDS, "bad ids [[...]"),
        ("the key sk-1 and the key op-2", PROMPT, "the key [...] and the key [...]"),
        ("a prompt of one word is not found: Hi", "Hi", "a prompt of one word is not found: Hi"),
        ("", PROMPT, ""),
    ],
)
def test_an_error_shows_neither_keys_nor_prompts(message: str, prompt: str, shown: str) -> None:
    assert short(message, secrets=("sk-1", "op-2", ""), prompt=prompt) == shown


def test_an_error_is_short() -> None:
    assert len(short("x" * 5000, secrets=(), prompt="")) == LIMIT
