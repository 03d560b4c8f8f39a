"""Names of one model: which of them stands for all."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest

from ppd.proxy.fleet.worker import settled


@pytest.mark.parametrize(
    ("aliases", "expected"),
    [
        ({}, {}),
        ({"b": "a"}, {"b": "a"}),
        ({"c": "b", "b": "a"}, {"c": "a", "b": "a"}),  # two workers know different names
        ({"a": "b"}, {"a": "a"}),
        ({"a": "b", "b": "a"}, {"a": "a", "b": "a"}),
        ({"c": "a", "a": "b"}, {"c": "a", "a": "a"}),
        ({"c": "c"}, {"c": "c"}),
    ],
)
def test_the_least_name_stands_for_all(aliases: Mapping[str, str], expected: Mapping[str, str]) -> None:
    assert settled(aliases) == expected


class Name(str):
    """Counts how often names are compared."""

    compared = 0

    def __lt__(self, other: str) -> bool:
        Name.compared += 1
        return super().__lt__(other)


def test_names_that_stand_for_one_another_in_a_row_are_compared_a_few_times_each() -> None:
    """As an agent may announce them: each had been followed to the end of the row."""
    names = [Name(f"m{at:04}") for at in range(2000)]
    pairs = list(zip(names[1:], names[:-1], strict=True))
    Random(0).shuffle(pairs)
    Name.compared = 0
    found = settled(dict(pairs))
    assert set(found.values()) == {"m0000"} and len(found) == 1999
    assert Name.compared < 20 * len(names)
