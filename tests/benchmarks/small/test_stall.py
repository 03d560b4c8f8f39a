"""The bodies of the stall benchmark are what their names say."""

from __future__ import annotations

import json

import pytest

from benchmarks.small.large_bodies import FORM, KINDS, chat, completion, ids, many, text, upload, user
from ppd.proxy.openai.form import field


def test_each_kind_has_a_name_of_its_own() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("size", [1, 57, 1000])
def test_a_text_has_the_size_that_was_asked(size: int) -> None:
    assert len(json.loads(text(size))) == size


def test_bodies_are_json_and_uploads_are_forms() -> None:
    assert len(json.loads(chat(many(user(text(9)), 3)))["messages"]) == 3
    assert len(json.loads(completion(ids(7)))["prompt"]) == 7
    assert field(FORM, upload(2, 5), "model") == "large"
