"""A template of the simulated engine's own, in which a prompt with an answer begins every later prompt.

    <|im_start|>role\\ncontent<|im_end|>\\n ... <|im_start|>assistant\\n

Tools come first, in a system turn of their own; a tool call is JSON inside the assistant's turn; reasoning is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..core.reasoning import Thoughts
from .conversation import Call, Conversation, Message, Result, Text, json_text

THOUGHTS = Thoughts("<think>\n", "\n</think>\n\n")


def pieces(conversation: Conversation) -> Iterator[Text]:
    if conversation.kwargs:
        yield f"<|im_start|>config\n{json_text(conversation.kwargs, is_sorted=True)}<|im_end|>\n"
    if conversation.tools:
        tools = "\n".join(json_text(tool, is_sorted=True) for tool in conversation.tools)
        yield f"<|im_start|>system\n# Tools\n{tools}<|im_end|>\n"
    for at, message in enumerate(conversation.messages, start=1):
        yield f"<|im_start|>{message.role}\n"
        yield from _content(message)
        if not conversation.continues or at < len(conversation.messages):
            yield "<|im_end|>\n"
    if conversation.opens:
        yield "<|im_start|>assistant\n"


def _content(message: Message) -> Iterator[Text]:
    for part in message.parts:
        if isinstance(part, Call):
            yield part.text()
        elif isinstance(part, Result):
            yield from ("<tool_response>\n", *part.content, "\n</tool_response>")
        else:
            yield part
