"""How clients write a conversation's next request: each form is a generator of the requests of one session.

Each one's docstring names a client that does so. Texts are made up; lengths are drawn around what such clients send.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from random import Random
from typing import Any, NamedTuple

from msgspec.structs import replace

from ppd.proxy.openai.request import Endpoint

from .requests import Asked, called, result, said, tool
from .templates import Message
from .texts import call_id, mixed, prose

Session = Iterator[Asked]
Messages = list[dict[str, Any]]

TURNS = 8
ROUNDS, LOOP = 3, 6  # of an agent: questions, and requests with calls for each
SEARCHES = 0.6  # share of questions for which something is retrieved
THINK_S = 5.0


def grows(random: Random) -> Session:
    """Most clients: the history as it was, the answer, and a new message."""
    messages = [said("system", prose(random, 300))]
    for _ in range(TURNS):
        messages.append(said("user", prose(random, random.randint(20, 200))))
        yield _asked(random, messages, said("assistant", prose(random, random.randint(50, 400))))


def grows_mixed(random: Random) -> Session:
    """The same with code, JSON and Chinese among the texts."""
    messages = [said("system", prose(random, 300))]
    for _ in range(TURNS):
        messages.append(said("user", mixed(random, random.randint(20, 600))))
        yield _asked(random, messages, said("assistant", mixed(random, random.randint(50, 400))))


def reminder(random: Random) -> Session:
    """aider: a reminder follows each last message, and is gone from it in the next request."""
    messages, note = [said("system", prose(random, 800))], prose(random, 120)
    for _ in range(TURNS):
        messages.append(said("user", prose(random, random.randint(50, 300))))
        sent = [*messages[:-1], said("user", f"{messages[-1]['content']}\n\n{note}")]
        yield _asked(random, sent, reply := said("assistant", prose(random, random.randint(100, 400))))
        messages.append(reply)


def retrieved(random: Random) -> Session:
    """Open WebUI: what was retrieved for the last question stands before it, and is gone from the next request."""
    messages = [said("system", prose(random, 200))]
    for _ in range(TURNS):
        question = prose(random, random.randint(20, 100))
        context = f"<context>\n{prose(random, 1500)}\n</context>\n\n" if random.random() < SEARCHES else ""
        sent = [*messages, said("user", context + question)]
        yield _asked(random, sent, reply := said("assistant", prose(random, random.randint(100, 300))))
        messages += [said("user", question), reply]


def clock(random: Random) -> Session:
    """A system prompt that ends with the time of the request."""
    system, messages = prose(random, 1500), Messages()
    for minute in range(TURNS):
        messages.append(said("user", prose(random, random.randint(20, 200))))
        sent = [said("system", f"{system}\nIt is 12:{minute:02} now."), *messages]
        yield _asked(random, sent, reply := said("assistant", prose(random, random.randint(50, 300))))
        messages.append(reply)


def new_tool(random: Random) -> Session:
    """An agent whose server offers another tool at every third turn."""
    messages, tools = [said("system", prose(random, 1500))], _tools(random, 6)
    for turn in range(TURNS):
        if turn % 3 == 2:
            tools = [*tools, *_tools(random, 1)]
        messages.append(said("user", prose(random, random.randint(20, 200))))
        yield _asked(random, messages, said("assistant", prose(random, random.randint(50, 300))), tools=tools)


def renumbered(random: Random) -> Session:
    """Clients that keep no ids of calls: each request numbers all of them anew."""
    for asked in _agent(random, Endpoint.CHAT, reasons=False):
        names: dict[str, str] = defaultdict(lambda: call_id(random))
        yield _with_ids(asked, names.__getitem__)


def tool_loop(random: Random) -> Session:
    """A reasoning agent over chat completions that sends `reasoning_content` back while a loop of calls lasts."""
    return _agent(random, Endpoint.CHAT, reasons=True)


def tool_loop_messages(random: Random) -> Session:
    """Claude Code: the same with thinking blocks over /v1/messages."""
    return _agent(random, Endpoint.MESSAGES, reasons=True)


def tool_loop_responses(random: Random) -> Session:
    """Codex CLI: the same over /v1/responses, without a stored history."""
    return _agent(random, Endpoint.RESPONSES, reasons=True)


def compacted(random: Random) -> Session:
    """Agents near the end of their context: the history is replaced by a summary, after the same head."""
    head, messages = [said("system", prose(random, 1200))], Messages()
    for turn in range(TURNS):
        if turn == TURNS // 2:
            messages = [said("user", f"Summary so far: {prose(random, 400)}")]
            messages.append(said("assistant", "Understood."))
        messages.append(said("user", prose(random, random.randint(100, 400))))
        yield _asked(random, [*head, *messages], reply := said("assistant", prose(random, random.randint(50, 300))))
        messages.append(reply)


def cut(random: Random) -> Session:
    """A window over the history: its oldest turns are left out, after the same head and the first question."""
    head = [said("system", prose(random, 800)), said("user", prose(random, 300))]
    messages = Messages()
    for turn in range(TURNS):
        if turn:
            messages.append(said("user", prose(random, random.randint(50, 300))))
        if len(messages) > 6:
            messages = messages[2:]
        yield _asked(random, [*head, *messages], reply := said("assistant", prose(random, random.randint(50, 300))))
        messages.append(reply)


def edited(random: Random) -> Session:
    """Chat windows: a message is edited, or another answer is wanted, at every third turn."""
    messages = [said("system", prose(random, 400))]
    for turn in range(TURNS):
        if turn % 3 == 2 and len(messages) > 4:
            messages = messages[:-4] if turn % 2 else messages[:-2]
        messages.append(said("user", prose(random, random.randint(20, 300))))
        yield _asked(random, messages, said("assistant", prose(random, random.randint(50, 300))))


def twice(random: Random) -> Session:
    """Benchmarks, retries by hand: each prompt is sent again, and has nothing after it."""
    prompt = [said("system", prose(random, 400)), said("user", prose(random, 1500))]
    for number in range(2):
        yield Asked(messages=prompt, reply=said("assistant", prose(random, 100)), think_s=THINK_S, follows=number > 0)


def shared_head(random: Random) -> Session:
    """Helpers of 40 applications: the sessions of one share its long system prompt, and nothing else."""
    messages = [said("system", _shared("application", random.randrange(40), 12_000))]
    for _ in range(3):
        messages.append(said("user", prose(random, random.randint(50, 300))))
        yield _asked(random, messages, said("assistant", prose(random, random.randint(50, 300))))


def shared_document(random: Random) -> Session:
    """Questions about 30 documents: one stands first in the first message, under one system prompt for all."""
    question = f"{_shared('document', random.randrange(30), 8_000)}\n\n{prose(random, 40)}"
    messages = [said("system", _shared("system", 0, 200)), said("user", question)]
    yield _asked(random, messages, said("assistant", prose(random, 150)))
    messages.append(said("user", prose(random, 40)))
    yield _asked(random, messages, said("assistant", prose(random, 150)))


@lru_cache(maxsize=100)
def _shared(kind: str, number: int, tokens: int) -> str:
    return prose(Random(f"{kind} {number}"), tokens)


class Form(NamedTuple):
    session: Callable[[Random], Session]
    sessions: int = 1  # where others have one


FORMS: Mapping[str, Form] = {
    "grows": Form(grows),
    "grows, mixed texts": Form(grows_mixed),
    "reminder at the end": Form(reminder),
    "retrieved context": Form(retrieved),
    "clock in the system": Form(clock),
    "tools change": Form(new_tool),
    "calls renumbered": Form(renumbered),
    "tool loop, chat": Form(tool_loop),
    "tool loop, messages": Form(tool_loop_messages),
    "tool loop, responses": Form(tool_loop_responses),
    "compacted": Form(compacted),
    "cut": Form(cut),
    "edited": Form(edited),
    "same prompt twice": Form(twice),
    "shared heads": Form(shared_head, sessions=7),
    "shared documents": Form(shared_document, sessions=7),
}


def _asked(random: Random, messages: Messages, reply: dict[str, Any], **members: Any) -> Asked:
    """Of the messages as they are now; where the list is the session's own, the reply is added to it."""
    sent = Asked(
        messages=[*messages],
        reply=reply,
        think_s=random.expovariate(1 / THINK_S),
        follows=any(message["role"] == "assistant" for message in messages),
        **members,
    )
    messages.append(reply)
    return sent


def _agent(random: Random, endpoint: Endpoint, *, reasons: bool) -> Session:
    """Rounds of a question, calls of tools with their results, and an answer."""
    messages, tools = [said("system", prose(random, 1000))], _tools(random, 8)

    def asked(reply: dict[str, Any]) -> Asked:
        if reasons:
            reply["reasoning_content"] = prose(random, random.randint(80, 500))
        return _asked(random, messages, reply, tools=tools, endpoint=endpoint)

    for _ in range(ROUNDS):
        messages.append(said("user", prose(random, random.randint(30, 200))))
        for _ in range(LOOP):
            id, name = call_id(random), random.choice(tools)["function"]["name"]
            yield asked(called([(id, name, {"path": prose(random, 4), "limit": random.randint(1, 400)})]))
            messages.append(result(id, mixed(random, random.randint(50, 900))))
        yield asked(said("assistant", prose(random, random.randint(50, 300))))


def _tools(random: Random, count: int) -> list[dict[str, Any]]:
    return [
        tool(f"tool_{random.getrandbits(24):06x}", prose(random, 60), path="string", limit="integer")
        for _ in range(count)
    ]


def _with_ids(asked: Asked, name: Callable[[str], str]) -> Asked:
    """The same request with other ids of its calls."""

    def renamed(message: Message) -> Message:
        if message["role"] == "tool":
            return {**message, "tool_call_id": name(message["tool_call_id"])}
        calls = [{**call, "id": name(call["id"])} for call in message.get("tool_calls") or ()]
        return {**message, "tool_calls": calls} if calls else message

    return replace(asked, messages=list(map(renamed, asked.messages)))
