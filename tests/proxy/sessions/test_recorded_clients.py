"""Each next request of a client's recorded conversation goes on from the one before, with all of its prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.sessions.table import MatchKind, SessionTable, TurnOutcome
from tests.support.requests import parse_bytes

PIECES: dict[str, Callable[..., None]] = {
    "text": lambda reply, text: reply.add_text(text),
    "call": ReplyKey.add_tool_call,
    "reasoning": ReplyKey.add_reasoning,
}
PRODUCTS = ("claude_code", "codex")
MACHINES = re.compile(r"/(?:tmp|root|home|work|Users)\b")
REWRITES = ("smolagents",)  # it repeats a reply's calls as text, so that only the prompt before them is known
FOLDER = Path(__file__).parents[2] / "data" / "clients"


def conversations() -> Iterator[Any]:
    for path in sorted(FOLDER.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for endpoint, recorded in groupby(lines, lambda line: Endpoint(line["endpoint"])):
            yield pytest.param([*recorded], id=f"{path.stem}, {endpoint.name.lower()}")


@pytest.mark.parametrize("recorded", [*conversations()])
def test_each_next_request_of_a_client_is_found_with_its_whole_prefix(recorded: list[dict[str, Any]]) -> None:
    sessions, held, now_s = SessionTable(ttl_s=3600.0, capacity=100), 0, 0.0
    assert len(recorded) > 1
    for turn, line in enumerate(recorded, start=1):
        request = parse_bytes(json.dumps(line["body"]).encode(), Endpoint(line["endpoint"]))
        match = sessions.find(request.prompt, now_s)
        assert (match.kind, match.turn) == (MatchKind.NEXT if turn > 1 else MatchKind.FIRST, turn)
        assert match.held_tokens == held
        reply, (prompt, completion) = ReplyKey(request), line["usage"]
        for kind, *piece in line["reply"]:
            PIECES[kind](reply, *piece)
        outcome = TurnOutcome(
            prompt_tokens=prompt,
            completion_tokens=completion,
            reply_key=reply.key(),
            response_id=line["response_id"],
        )
        now_s += 1.0
        sessions.finish(match, request.prompt, outcome, now_s)
        held = prompt if line["client"].startswith(REWRITES) else prompt + completion


@pytest.mark.parametrize(
    ("said", "held"), [('{"limit":5}', 13_100), ('{"limit": 5}', 13_100), ('{"limit":5.0}', 13_000)]
)
def test_a_call_whose_number_is_shown_in_another_form_leaves_the_prompt_before_it(said: str, held: int) -> None:
    lines = (FOLDER / "claude_code.jsonl").read_text().splitlines()[:2]
    first, second = (parse_bytes(json.dumps(body).encode(), Endpoint.MESSAGES) for body in calling(lines, {"limit": 5}))
    sessions, reply = SessionTable(ttl_s=3600.0, capacity=100), ReplyKey(first)
    reply.add_tool_call(0, "call_1", "Read", said)
    outcome = TurnOutcome(prompt_tokens=13_000, completion_tokens=100, reply_key=reply.key())
    sessions.finish(sessions.find(first.prompt, 0.0), first.prompt, outcome, 1.0)
    match = sessions.find(second.prompt, 1.0)
    assert (match.kind, match.held_tokens) == (MatchKind.NEXT, held)


def calling(lines: list[str], shown: dict[str, Any]) -> Iterator[Any]:
    """The bodies, with these arguments of each call that they show."""
    for line in lines:
        body = json.loads(line)["body"]
        for message in body["messages"]:
            for block in message["content"]:
                if isinstance(block, dict) and block["type"] == "tool_use":
                    block["input"] = shown
        yield body


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_names_its_conversation_in_each_request(product: str) -> None:
    lines = [json.loads(line) for line in (FOLDER / f"{product}.jsonl").read_text().splitlines()]
    names = {parse_bytes(json.dumps(line["body"]).encode(), Endpoint(line["endpoint"])).prompt.label for line in lines}
    assert len(names) == 1
    assert names != {None}


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_recording_of_a_product_tells_nothing_of_its_machine(product: str) -> None:
    assert not MACHINES.search((FOLDER / f"{product}.jsonl").read_text())
