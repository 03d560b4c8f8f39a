"""Templates that drop the reasoning of the round before, and what is claimed of such a round."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.sessions.rendered_replies import Doubt, RenderedReplies, keeps_reply
from ppd.proxy.sessions.table import MatchKind, SessionMatch, SessionTable, TurnOutcome
from tests.support.attempts import D1, D2
from tests.support.requests import CHAT, MESSAGES, RESPONSES, assistant, call, parse, user

ROUND = Doubt(2772, 8678, is_reasoned=True, round_is_over=True)


@pytest.mark.parametrize(
    ("prompt_tokens", "cached", "keeps"),
    [
        (8718, 8672, True),  # whole blocks only
        (8718, 8656, True),
        (9000, 2768, False),
        (9000, 2816, False),  # both ways to begin a reply are in the template
        (7874, None, False),  # the prompt is shorter than what it should begin with
        (7874, 0, False),
        (9000, None, None),
        (9000, 0, None),  # evicted
        (9000, 1600, None),
        (9000, 5000, None),
    ],
)
def test_what_an_answer_shows_of_the_template(prompt_tokens: int, cached: int | None, keeps: bool | None) -> None:
    assert keeps_reply(ROUND, prompt_tokens, cached) is keeps


def test_a_short_round_shows_nothing() -> None:
    assert keeps_reply(Doubt(1000, 1255, is_reasoned=True, round_is_over=True), 1300, 1255) is None


@pytest.mark.parametrize(
    ("answers", "keeps"),
    [
        ("", False),  # the safe error
        ("k", True),
        ("d", False),
        ("kd", False),
        ("kkkd", True),
        ("k" * 50 + "ddd", False),  # the template was changed
        ("d" * 50 + "kkkk", True),
        ("?" * 10, False),
    ],
)
def test_a_models_template_is_learned_from_its_newest_answers(answers: str, keeps: bool) -> None:
    rounds = RenderedReplies()
    for answer in answers:
        rounds.learn("m", ROUND, 9000, {"k": 8672, "d": 2768, "?": 0}[answer])
    assert rounds.keeps("m", ROUND) is keeps
    assert rounds.keeps("another", ROUND) is False


def test_the_models_that_are_remembered_are_bounded() -> None:
    rounds = RenderedReplies(capacity=2)
    for model in ("a", "b", "a", "c"):
        rounds.learn(model, ROUND, 9000, 8672)
    assert [rounds.keeps(model, ROUND) for model in "abc"] == [True, False, True]


class Agent:
    """Turns of one conversation; a reply of 400 tokens reasons over as many again."""

    def __init__(self, *, keeps: bool, reasons: bool = True) -> None:
        self.table = SessionTable(ttl_s=3600.0, capacity=10)
        self.keeps, self.reasons = keeps, reasons
        self.history: list[dict[str, Any]] = []

    def turn(self, *added: dict[str, Any], prompt_tokens: int, cached: int | None = None) -> SessionMatch:
        self.history += added
        request = parse(prompt=self.history)
        match = self.table.find(request.prompt, 0.0)
        key, number = ReplyKey(request), str(len(self.history))
        key.add_tool_call(0, number, "f", "{}")
        outcome = TurnOutcome(
            prompt_tokens=prompt_tokens,
            completion_tokens=800,
            cached_tokens=cached,
            reply_key=key.key(),
            reasoned=self.reasons,
            decode=D1,
        )
        self.table.finish(match, request.prompt, outcome, 0.0)
        self.history.append(assistant(tool_calls=[call(number)]))
        return match

    def loop(self, requests: int, at: int) -> int:
        """Tokens of the last prompt, each 600 above the one before; the first, of the user, has `at` tokens."""
        said = user("q" * 2000)
        for number in range(requests):
            self.turn(said, prompt_tokens=at + 600 * number)
            said = {"role": "tool", "tool_call_id": str(len(self.history) - 1), "content": "result " * 100}
        self.history.append(said)
        return at + 600 * (requests - 1)


@pytest.mark.parametrize(("endpoint", "claimed"), [(CHAT, 1800), (MESSAGES, 1000)])
def test_a_reply_to_a_message_that_the_client_began_is_held_where_the_engine_continues_that(
    endpoint: Endpoint, claimed: int
) -> None:
    table, asked = SessionTable(ttl_s=3600.0, capacity=10), user("q" * 4000)
    request = parse(endpoint, [asked, assistant("Once upon")], continue_final_message=True)
    key = ReplyKey(request)
    key.add_text(" a time")
    outcome = TurnOutcome(
        prompt_tokens=1000, completion_tokens=800, reply_key=key.key(), reasoned=key.reasoned, decode=D1
    )
    table.finish(table.find(request.prompt, 0.0), request.prompt, outcome, 0.0)
    following = parse(endpoint, [asked, assistant("Once upon a time"), user("and then?")])
    match = table.find(following.prompt, 0.0)
    assert (match.kind, match.turn) == (MatchKind.NEXT, 2)
    assert claimed - 10 < match.held_tokens <= claimed


@pytest.mark.parametrize(("reasons", "claimed"), [(True, 2772), (False, 2772 + 600 * 12 + 800)])
def test_the_first_turn_after_a_loop_claims_what_came_before_it_until_the_template_is_known(
    reasons: bool, claimed: int
) -> None:
    agent = Agent(keeps=False, reasons=reasons)
    agent.loop(13, 2772)
    match = agent.turn(user("thanks, and now"), prompt_tokens=7874, cached=2768)
    assert (match.kind, match.turn, match.held_tokens) == (MatchKind.NEXT, 14, claimed)
    assert match.doubt is not None and match.doubt.is_reasoned is reasons
    if reasons:
        before = parse(prompt=agent.history[:1]).prompt_bytes
        assert match.new_bytes == parse(prompt=agent.history[:-1]).prompt_bytes - before


def test_inside_of_a_loop_each_turn_claims_the_prompt_before_it() -> None:
    agent = Agent(keeps=False)
    last = agent.loop(5, 2772)
    match = agent.turn(prompt_tokens=last + 600)
    assert match.held_tokens == last


@pytest.mark.parametrize("keeps", [True, False])
def test_a_template_that_keeps_reasoning_is_believed_from_the_second_loop_on(keeps: bool) -> None:
    agent, claims = Agent(keeps=keeps), []
    at = 2772
    for _ in range(3):
        last = agent.loop(10, at)
        after = last + 640 if keeps else at + 2000
        cached = last // 16 * 16 if keeps else at // 16 * 16
        match = agent.turn(user("go on"), prompt_tokens=after, cached=cached)
        claims.append((match.held_tokens == last, match.held_tokens == at))
        agent.history.append({"role": "tool", "tool_call_id": "x", "content": "r"})
        at = after + 700
    assert claims == [(False, True)] + [(keeps, not keeps)] * 2


def test_counts_of_a_round_that_was_rendered_anew_are_not_believed_any_longer() -> None:
    agent = Agent(keeps=False)
    agent.loop(13, 2772)
    agent.turn(user("thanks, and now"), prompt_tokens=7874, cached=2768)
    for kept in range(2, len(agent.history) - 2):
        match = agent.table.find(parse(prompt=[*agent.history[:kept], user("an edit")]).prompt, 0.0)
        assert match.held_tokens <= 7874
    first = agent.table.find(parse(prompt=[agent.history[0], user("an edit")]).prompt, 0.0)
    assert first.held_tokens == 2772


def test_a_stored_response_claims_no_reasoning() -> None:
    table = SessionTable(ttl_s=3600.0, capacity=10)
    first = parse(RESPONSES, "hi")
    outcome = TurnOutcome(prompt_tokens=500, completion_tokens=900, response_id="resp_1", reasoned=True, decode=D1)
    table.finish(table.find(first.prompt, 0.0), first.prompt, outcome, 0.0)
    following = table.find(parse(RESPONSES, "more", previous_response_id="resp_1").prompt, 0.0)
    assert (following.kind, following.held_tokens) == (MatchKind.NEXT, 500)


def test_results_of_tools_are_no_message_by_the_user() -> None:
    result = user([{"type": "tool_result", "tool_use_id": "t1", "content": "42"}])
    use = assistant([{"type": "tool_use", "id": "t1", "name": "f", "input": {}}])
    marks = parse(MESSAGES, [user("q"), use, result]).prompt.chain.marks
    assert (marks.first_user, marks.last_user) == (1, 1)


REASONED = {"reasoning_content": "hm " * 300}


@pytest.mark.parametrize(
    ("sent_back", "reasoned", "cached", "claimed"),
    [
        (REASONED, True, 1800, [1000, 1800]),  # kept: believed from the second reply on
        ({"reasoning": "hm"}, True, 1800, [1000, 1800]),
        (REASONED, True, 1008, [1000, 1000]),  # dropped
        (REASONED, True, 0, [1000, 1000]),  # evicted
        ({"reasoning_content": ""}, True, 1800, [1000, 1000]),  # not sent back: nothing is learned
        ({}, True, 1800, [1000, 1000]),
        ({}, False, 1008, [1800, 1000]),  # an empty block stood before the reply
        ({}, False, 1792, [1800, 1800]),
        ({}, False, 0, [1800, 1800]),
    ],
)
def test_inside_of_a_loop_a_reply_is_claimed_as_answers_have_shown(
    sent_back: dict[str, Any], reasoned: bool, cached: int, claimed: list[int]
) -> None:
    table = SessionTable(ttl_s=3600.0, capacity=10)
    for expected in claimed:
        agent = Agent(keeps=True, reasons=reasoned)
        agent.table = table
        agent.turn(user(f"q{expected}{len(table)}"), prompt_tokens=1000)
        agent.history[-1].update(sent_back)
        result = {"role": "tool", "tool_call_id": "1", "content": "result"}
        assert agent.turn(result, prompt_tokens=1900, cached=cached).held_tokens == expected


def test_a_worker_that_did_not_write_the_reply_shows_nothing_of_the_template() -> None:
    agent = Agent(keeps=True, reasons=False)
    agent.turn(user("q"), prompt_tokens=1000)
    match = agent.table.find(parse(prompt=[*agent.history, user("more")]).prompt, 0.0)
    assert match.doubt is not None
    outcome = TurnOutcome(prompt_tokens=1900, completion_tokens=9, cached_tokens=1000, decode=D2)
    agent.table.finish(match, parse(prompt=[*agent.history, user("more")]).prompt, outcome, 0.0)
    assert agent.table.rendered.scores() == []


THINKS = {"type": "reasoning", "id": "r", "summary": [], "content": []}
CALLS = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "42"}


@pytest.mark.parametrize(
    ("path", "prompt", "reasons"),
    [
        (MESSAGES, [user("q"), assistant([{"type": "thinking", "thinking": "hm"}]), user("r")], True),
        (MESSAGES, [user("q"), assistant([{"type": "redacted_thinking", "data": "x"}]), user("r")], False),
        (RESPONSES, [user("q"), THINKS, CALLS, CALLS, RESULT, RESULT], True),
        (RESPONSES, [user("q"), THINKS, CALLS, RESULT, CALLS, RESULT], False),
        (RESPONSES, [user("q"), THINKS, user("r"), CALLS, RESULT], False),
    ],
)
def test_whether_the_newest_reply_comes_with_its_reasoning(path: Endpoint, prompt: list[Any], reasons: bool) -> None:
    assert parse(path, prompt).prompt.chain.marks.reasons is reasons


def test_other_processes_hear_of_what_changes() -> None:
    ours, theirs, sent = RenderedReplies(), RenderedReplies(), list[Any]()

    class Copies:
        def catch_up(self) -> None: ...

        def changed(self, case: Any, score: int) -> None:
            sent.append(case)
            theirs.adopt(case, score)

    ours.replicated = Copies()
    for _ in range(10):
        ours.learn("m", ROUND, 9000, 8672)
    assert theirs.keeps("m", ROUND) and len(sent) == 3
