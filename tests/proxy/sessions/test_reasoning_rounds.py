"""Templates that drop the reasoning of the round before, and what is claimed of such a round."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.sessions.reasoning_rounds import ReasoningRounds, RoundEnd, keeps_reasoning
from ppd.proxy.sessions.table import MatchKind, SessionMatch, SessionTable, TurnOutcome
from tests.support.attempts import D1
from tests.support.requests import MESSAGES, RESPONSES, assistant, call, parse, user

ROUND = RoundEnd(2772, 8678)


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
    assert keeps_reasoning(ROUND, prompt_tokens, cached) is keeps


def test_a_short_round_shows_nothing() -> None:
    assert keeps_reasoning(RoundEnd(1000, 1255), 1300, 1255) is None


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
    rounds = ReasoningRounds()
    for answer in answers:
        rounds.learn("m", ROUND, 9000, {"k": 8672, "d": 2768, "?": 0}[answer])
    assert rounds.keeps("m") is keeps
    assert rounds.keeps("another") is False


def test_the_models_that_are_remembered_are_bounded() -> None:
    rounds = ReasoningRounds(capacity=2)
    for model in ("a", "b", "a", "c"):
        rounds.learn(model, ROUND, 9000, 8672)
    assert [rounds.keeps(model) for model in "abc"] == [True, False, True]


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


@pytest.mark.parametrize(("reasons", "claimed"), [(True, 2772), (False, 2772 + 600 * 12 + 800)])
def test_the_first_turn_after_a_loop_claims_what_came_before_it_until_the_template_is_known(
    reasons: bool, claimed: int
) -> None:
    agent = Agent(keeps=False, reasons=reasons)
    agent.loop(13, 2772)
    match = agent.turn(user("thanks, and now"), prompt_tokens=7874, cached=2768)
    assert (match.kind, match.turn, match.held_tokens) == (MatchKind.NEXT, 14, claimed)
    assert (match.round_end is not None) is reasons
    if reasons:
        before = parse(prompt=agent.history[:1]).prompt_bytes
        assert match.new_bytes == parse(prompt=agent.history[:-1]).prompt_bytes - before


def test_inside_of_a_loop_each_turn_claims_the_prompt_before_it() -> None:
    agent = Agent(keeps=False)
    last = agent.loop(5, 2772)
    match = agent.turn(prompt_tokens=last + 600)
    assert (match.held_tokens, match.round_end) == (last, None)


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
