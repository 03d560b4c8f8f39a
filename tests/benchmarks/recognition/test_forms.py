"""Forms of histories: what each does to the next request's prompt, and that every API carries it."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import msgspec
import pytest

from benchmarks.recognition import forms, templates, tokens
from benchmarks.recognition.requests import Asked
from ppd.proxy.openai.request import Endpoint
from tests.support.requests import parse_bytes

TOKENIZER = tokens.by_pieces()


def prompts(form: forms.Form) -> list[tuple[Asked, bytes]]:
    return [
        (asked, TOKENIZER(templates.qwen(asked.messages, asked.tools, True)))
        for asked in form.session(Random("a seed"))
    ]


@pytest.mark.parametrize(
    ("name", "whole", "most"),
    [
        ("grows", 1.0, 1.0),
        ("reminder at the end", 0.0, 0.99),
        ("clock in the system", 0.0, 0.9),
        ("compacted", 0.5, 0.95),
        ("cut", 0.1, 0.9),
        ("tool loop, chat", 0.8, 0.95),
        ("same prompt twice", 1.0, 1.0),
    ],
)
def test_how_often_the_prompt_before_is_a_prefix_of_the_next(name: str, whole: float, most: float) -> None:
    runs = [run for _, run in prompts(forms.FORMS[name])]
    pairs = list(pairwise(runs))
    share = sum(after.startswith(before) for before, after in pairs) / len(pairs)
    assert whole <= share <= most
    assert all(tokens.common(before, after) > 20 for before, after in pairs), "the head is always shared"


def test_every_form_says_truly_whether_it_follows() -> None:
    for name, form in forms.FORMS.items():
        assert [asked.follows for asked, _ in prompts(form)] == [False, *[True] * (len(prompts(form)) - 1)], name


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.RESPONSES])
def test_every_api_carries_a_conversation_with_calls(endpoint: Endpoint) -> None:
    asked = [one for one, _ in prompts(forms.FORMS["tool loop, chat"])][-1]
    request = parse_bytes(msgspec.structs.replace(asked, endpoint=endpoint).body(), endpoint)
    text = sum(len(message["content"]) for message in asked.messages)
    assert text < request.prompt_bytes < 2 * text


def test_renumbered_calls_have_other_ids_in_each_request_and_the_same_text() -> None:
    sent = prompts(forms.FORMS["calls renumbered"])
    ids = [{message.get("tool_call_id") for message in asked.messages} - {None} for asked, _ in sent]
    assert not ids[1] & ids[2]
    assert sent[2][1].startswith(sent[1][1])
