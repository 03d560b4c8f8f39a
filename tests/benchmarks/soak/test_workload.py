"""What the soak's clients ask follows from the seed, and a history is the same in each request that shows it."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

from benchmarks.soak.workload import Move, SoakConversation, SoakRequest
from ppd.proxy.openai.request import MESSAGES_MEMBER, Endpoint

CALLS = {Endpoint.CHAT: "tool_calls", Endpoint.MESSAGES: "tool_use", Endpoint.RESPONSES: "function_call_output"}


def requests(number: int) -> list[SoakRequest]:
    conversation, found = SoakConversation(0, number), list[SoakRequest]()
    while (request := conversation.next()) is not None:
        found.append(request)
        conversation.answered(f"answer {len(found)}")
    return found


def test_agents_calls_are_asked_over_each_endpoint_that_has_them() -> None:
    seen = Counter[Endpoint]()
    for number in range(60):
        for request in requests(number):
            seen[request.endpoint] += CALLS.get(request.endpoint, "none") in json.dumps(request.body)
    assert all(seen[endpoint] > 5 for endpoint in CALLS) and not seen[Endpoint.COMPLETIONS]


def test_what_was_said_is_said_again() -> None:
    for number in range(60):
        for earlier, later in pairwise(requests(number)):
            if (
                later.move is Move.CONTINUE
                and earlier.move is not Move.IMPOSSIBLE
                and later.endpoint in MESSAGES_MEMBER
            ):
                member = MESSAGES_MEMBER[later.endpoint]
                before, now = earlier.body[member], later.body[member]
                assert now[: len(before)] == before and len(now) >= len(before) + 2
