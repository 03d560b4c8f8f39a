"""The load generator's conversations."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from benchmarks.overhead.bodies import MARK, WORD, ChatShape, follow_ups, opening
from benchmarks.overhead.native import SOURCES

TALK = ChatShape(turns=4, words=3, streams=True, first_us=7, every_us=11)


def decoded(bodies: bytes) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in bodies.splitlines()]


def test_each_turn_goes_on_from_the_answer_to_the_one_before() -> None:
    turns = decoded(opening(TALK) + follow_ups(TALK))
    assert len(turns) == TALK.turns
    for before, after in pairwise(turns):
        answer = {"role": "assistant", "content": 3 * WORD}
        assert after["messages"][: len(before["messages"]) + 1] == [*before["messages"], answer]
        assert after["messages"][-1]["role"] == "user"


def test_a_conversation_is_told_by_its_first_user_message_alone() -> None:
    for body in opening(TALK), *follow_ups(TALK).splitlines():
        assert body.count(MARK.encode()) == 1
        assert decoded(body)[0]["messages"][1]["content"].startswith(f"{MARK} first=7us every=11us.")


def test_only_follow_ups_stream() -> None:
    assert "stream" not in decoded(opening(TALK))[0]
    assert all(turn["stream"] for turn in decoded(follow_ups(TALK)))


@pytest.mark.parametrize("size", [1000, 130_000, 600_000])
def test_a_prompt_is_about_as_long_as_asked_for(size: int) -> None:
    body = opening(ChatShape(opening_bytes=size, message_bytes=max(1000, size // 20)))
    assert size < len(body) < 1.05 * size + 500


def test_a_long_prompt_has_many_messages_and_ends_with_the_users() -> None:
    messages = decoded(opening(ChatShape(opening_bytes=130_000, message_bytes=6500)))[0]["messages"]
    assert len(messages) == 22
    assert [message["role"] for message in messages[:3]] == ["system", "user", "assistant"]
    assert messages[-1]["role"] == "user"


def test_both_programs_know_the_same_marks() -> None:
    marks = (SOURCES / "marks.h").read_text()
    assert f'#define CONVERSATION "{MARK.rstrip("0")}"' in marks
    assert f"#define DIGITS {MARK.count('0')} " in marks
    assert f'#define WORD "{WORD}"' in marks
