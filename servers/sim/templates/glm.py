"""GLM-4.6's template: the tools before the system's text, roles as markers without an end, results after `observation`.

An assistant's reasoning stays in the prompt until the next user's message, and leaves an empty pair of marks. Calls and
the words around the tools are the simulated engine's own, and the line after the marks is there without content too.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..core.reasoning import Thoughts
from .conversation import Conversation, Message, Text, joined, json_text, last_user, split_thoughts, stripped

THOUGHTS = Thoughts("\n<think>", "</think>\n", none="\n<think></think>\n", forbidden="\n")

_TOOLS = "<|system|>\n# Tools\n\nThese are the functions that you may call, each one a JSON schema:\n<tools>\n"
_USE = "\n</tools>\n\nTo call one, write its name and its arguments as JSON between <tool_call> and </tool_call>."
_NO_THOUGHTS, _NO_THOUGHTS_ASKED = "\n<think></think>", "/nothink"


def pieces(conversation: Conversation) -> Iterator[Text]:
    messages = joined(conversation.messages)
    yield "[gMASK]<sop>"
    if conversation.tools:
        yield _TOOLS + "\n".join(map(json_text, conversation.tools)) + _USE
    round_begins = last_user(messages)
    for at, message in enumerate(messages):
        if message.role == "tool":
            follows = at > 0 and messages[at - 1].role == "tool"
            yield "" if follows else "<|observation|>"
            yield from ("\n<tool_response>\n", *message.content, "\n</tool_response>")
        elif message.role == "assistant":
            yield from _assistant(message, shows_thoughts=at > round_begins)
        else:
            yield from (f"<|{message.role}|>\n", *message.content)
            if message.role == "user" and conversation.thinks is False:
                yield _NO_THOUGHTS_ASKED
    if conversation.opens:
        yield "<|assistant|>" + (_NO_THOUGHTS if conversation.thinks is False else "")


def _assistant(message: Message, *, shows_thoughts: bool) -> Iterator[Text]:
    thoughts, content = split_thoughts(message)
    thoughts = thoughts.strip("\n")
    yield "<|assistant|>"
    yield f"{THOUGHTS.opening}{thoughts}{THOUGHTS.closing}" if thoughts and shows_thoughts else THOUGHTS.none
    yield from stripped(content)
    for call in message.calls:
        yield call.text(parses=True)
