"""What the messages of a prompt hold."""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec
import pytest

from ppd.proxy.openai.prompts.shapes import PromptMessage, comes_with_reasoning
from tests.support.requests import text


class Unread(str):
    def __iter__(self) -> NoReturn:
        raise AssertionError("it was read character by character")


@pytest.mark.parametrize(
    ("content", "reasons"),
    [
        (Unread("a long reply"), False),
        (None, False),
        ([text("a part"), "and another"], False),
        ([text("so"), {"type": "thinking", "thinking": "hm"}], True),
    ],
)
def test_a_reply_comes_with_reasoning_only_where_a_part_says_so(content: Any, reasons: bool) -> None:
    if isinstance(content, list):
        content = msgspec.json.decode(msgspec.json.encode(content), type=list[str | dict[str, msgspec.Raw]])
    assert comes_with_reasoning(PromptMessage(role="assistant", content=content)) is reasons
