"""What a recorder hides, and what it leaves."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from .disguise import Disguise

ID = "call_0a1b2c3d"
UUID = "01a20968-beef-76c2-9619-cfb307a8a218"
WORDS = "You work in /tmp/walk-x6U since 2026-11-23; ask, or wait (at most 90 s)."
BODY = {
    "model": "sim",
    "system": [{"type": "text", "text": WORDS, "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": WORDS},
        {"role": "assistant", "content": [{"type": "tool_use", "id": ID, "name": "Read", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": ID, "content": f"{WORDS} Go."}]},
    ],
    "tools": [{"name": "Read", "input_schema": {"type": "object", "properties": {"name": {"description": WORDS}}}}],
    "metadata": {"user_id": json.dumps({"session_id": UUID, "started_ms": 1795454175907}, separators=(",", ":"))},
    "prompt_cache_key": UUID,
    "max_tokens": 1000,
}


def made() -> Disguise:
    return Disguise(random.Random(0).choice)


def words(body: Any) -> set[str]:
    return set(re.findall(r"[A-Za-z0-9]{4,}", json.dumps(body)))


def test_no_word_of_the_client_or_its_machine_is_left() -> None:
    shown = made().value(BODY)
    said = words(WORDS) | words(UUID) | {"1795454175907", "0a1b2c3d"}
    assert not words(shown) & said
    assert words(BODY) - said <= words(shown), "names of members, types, roles, tools and models stay"
    assert len(json.dumps(shown)) == len(json.dumps(BODY))


def test_equal_texts_stay_equal_and_beginnings_common() -> None:
    shown = made().value(BODY)
    text = shown["system"][0]["text"]
    first, call, result = shown["messages"]
    assert first["content"] == text == shown["tools"][0]["input_schema"]["properties"]["name"]["description"]
    assert result["content"][0]["content"].startswith(text + " ")
    assert re.sub("[A-Za-z0-9]", "x", text) == re.sub("[A-Za-z0-9]", "x", WORDS)
    assert call["content"][0]["id"] == result["content"][0]["tool_use_id"] != ID
    assert json.loads(shown["metadata"]["user_id"])["session_id"] == shown["prompt_cache_key"]


def test_a_reply_is_disguised_as_its_echo_is() -> None:
    disguise, arguments = made(), {"path": "far away", "depth": 2}
    told = disguise.reply(["call", 0, ID, "Read", json.dumps(arguments, separators=(",", ":"))])
    assert told[2:4] == [disguise.id(ID), "Read"]
    assert json.loads(told[4]) == disguise.value(arguments) != arguments
    assert disguise.reply(["text", WORDS]) == ["text", disguise.text(WORDS)]
    assert disguise.reply(["reasoning"]) == ["reasoning"]


def test_different_words_stay_different() -> None:
    disguise, numbers = made(), [f"{number:02}" for number in range(100)]
    assert len({disguise.text(number) for number in numbers}) == len(numbers)


def test_the_mark_that_engines_look_for_stays() -> None:
    text = "x-anthropic-billing-header: cc_version=2.1.0;"
    shown = made().text(text)
    assert shown.startswith("x-anthropic-billing-header: ")
    assert shown != text
