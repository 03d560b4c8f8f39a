"""Templates and tokens: what stands where, what is dropped when, and that a reply continues its prompt."""

from __future__ import annotations

import pytest

from benchmarks.recognition import templates, tokens
from benchmarks.recognition.requests import called, result, said, tool

QUESTION = [said("system", "Be brief."), said("user", "Where is it?")]
TOOLS = [tool("look", "Looks.", place="string")]
THOUGHT = called([("c1", "look", {"place": "here"})], reasoning_content="I wonder.")
LOOP = [*QUESTION, THOUGHT, result("c1", "There.")]


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("qwen", ("Be brief.", "Looks.", "Where is it?")),
        ("glm", ("Looks.", "Be brief.", "Where is it?")),
        ("llama", ("Be brief.", "Looks.", "Where is it?")),
    ],
)
def test_where_templates_put_tools_and_system(name: str, order: tuple[str, ...]) -> None:
    text = templates.TEMPLATES[name](QUESTION, TOOLS, True)
    assert list(order) == sorted(order, key=text.index)


@pytest.mark.parametrize(("name", "keeps"), [("qwen", True), ("glm", True), ("llama", False)])
def test_reasoning_is_dropped_at_the_next_user_message(name: str, keeps: bool) -> None:
    template = templates.TEMPLATES[name]
    assert ("I wonder." in template(LOOP, TOOLS, True)) is keeps
    assert "I wonder." not in template([*LOOP, said("assistant", "There."), said("user", "And?")], TOOLS, True)


@pytest.mark.parametrize("name", templates.TEMPLATES)
@pytest.mark.parametrize("reply", [said("assistant", "There."), THOUGHT], ids=["text", "call"])
def test_what_a_model_writes_continues_its_prompt_in_the_next_one(name: str, reply: templates.Message) -> None:
    template = templates.TEMPLATES[name]
    written = templates.written(template, QUESTION, TOOLS, reply)
    following = template([*QUESTION, reply, result("c1", "There.")], TOOLS, True)
    assert written
    assert following.startswith(template(QUESTION, TOOLS, True) + written)


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("The river lies between several gardens because nothing remains. " * 20, 4.5, 7.0),
        ('{"count": 8123, "path": "a/b", "items": [1, 22, 333]}' * 20, 1.5, 2.5),
        ("我们明天沿着河边散步" * 20, 1.5, 2.5),
    ],
    ids=["prose", "json", "chinese"],
)
def test_tokens_are_as_long_as_a_real_vocabulary_has_them(text: str, least: float, most: float) -> None:
    assert least <= len(text) / tokens.count(tokens.by_pieces()(text)) <= most


@pytest.mark.parametrize(
    ("one", "other", "expected"), [("", "", 0), ("abcd", "abxd", 2), ("abc", "abcdef", 3), ("xbc", "abc", 0)]
)
def test_common_prefixes_of_runs(one: str, other: str, expected: int) -> None:
    letters = tokens.by_simulated_engine()
    assert tokens.common(letters(one), letters(other)) == expected


def test_markers_part_texts() -> None:
    tokenizer = tokens.by_pieces()
    whole = tokenizer("<|im_start|>user\nHello there<|im_end|>\n")
    parts = ["<|im_start|>", "user\nHello there", "<|im_end|>", "\n"]
    assert whole == b"".join(map(tokenizer, parts))
