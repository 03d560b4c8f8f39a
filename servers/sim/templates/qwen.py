"""Qwen3's template: the system's text, then the tools, in one system turn; a round's tool results in one user turn.

An assistant's reasoning stays in the prompt until the next user's message. Calls and the words around the tools are
the simulated engine's own; a call always begins on a new line, and its JSON is compact.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..core.reasoning import Thoughts
from .conversation import Conversation, Message, Text, joined, json_text, last_user, split_thoughts, stripped

THOUGHTS = Thoughts("<think>\n", "\n</think>\n\n")

_TOOLS = "# Tools\n\nThese are the functions that you may call, each one a JSON schema:\n<tools>\n"
_USE = "\n</tools>\n\nTo call one, write its name and its arguments as JSON between <tool_call> and </tool_call>."


def pieces(conversation: Conversation) -> Iterator[Text]:
    messages = joined(conversation.messages)
    begins = messages.pop(0) if messages and messages[0].role == "system" else None
    if begins is not None or conversation.tools:
        yield "<|im_start|>system\n"
        yield from begins.content if begins is not None else ()
        if conversation.tools:
            separator = "" if begins is None else "\n\n"
            yield separator + _TOOLS + "\n".join(map(json_text, conversation.tools)) + _USE
        yield "<|im_end|>\n"
    round_begins = last_user(messages)
    for at, message in enumerate(messages):
        is_last = at + 1 == len(messages)
        if message.role == "tool":
            follows = at > 0 and messages[at - 1].role == "tool"
            yield "" if follows else "<|im_start|>user"
            yield from ("\n<tool_response>\n", *message.content, "\n</tool_response>")
            if not is_last and messages[at + 1].role == "tool":
                continue
        elif message.role == "assistant":
            yield from _assistant(message, shows_thoughts=-1 < round_begins < at, is_last=is_last)
        else:
            yield from (f"<|im_start|>{message.role}\n", *message.content)
        if not (conversation.continues and is_last):
            yield "<|im_end|>\n"
    if conversation.opens:
        yield "<|im_start|>assistant\n" + ("<think>\n\n</think>\n\n" if conversation.thinks is False else "")


def _assistant(message: Message, *, shows_thoughts: bool, is_last: bool) -> Iterator[Text]:
    thoughts, content = split_thoughts(message)
    yield "<|im_start|>assistant\n"
    if shows_thoughts and (thoughts or is_last):
        stripped_thoughts = thoughts.strip("\n")
        yield f"{THOUGHTS.opening}{stripped_thoughts}{THOUGHTS.closing}"
    yield from stripped(content) if thoughts else content
    for call in message.calls:
        yield call.text(parses=True)
