"""A prompt that begins as an earlier one did is read from there on, and is the request that reading all of it makes."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from ppd.proxy import plane
from ppd.proxy.bodies.known_frames import KnownFrames
from ppd.proxy.errors import RequestError
from ppd.proxy.openai.prompts import beginnings
from ppd.proxy.openai.prompts.beginnings import LEFT_REPLIES, POINTS, Beginning, Begun, KnownBeginnings
from ppd.proxy.openai.request import MESSAGES_MEMBER, Endpoint, ReadingRules, Request, parse_request
from ppd.proxy.sessions.hasher import PLACE_BYTES, Hasher
from ppd.proxy.sessions.templates import Templates
from ppd.proxy.sessions.text_cuts import LateCuts, TextCuts
from tests.support.requests import assistant, call, text, user

from .test_known_frames import shown

pytestmark = pytest.mark.skipif(not plane.IS_FAST, reason="lists have no digests where nothing is compiled")
SECRET = b"secret" * 8
TEMPLATES = Templates(with_call_ids=("printing", "printed"))
ALIASES = {"printed": "m"}  # by which its template prints ids, all the same
RULES = ReadingRules(
    hasher=Hasher(SECRET), tenant="t", depth_limit=None, units_limit=None, templates=TEMPLATES, aliases=ALIASES
)
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture(autouse=True)
def short_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short chats have beginnings."""
    points = [100, 250, *range(400, 20_000, 300)]
    monkeypatch.setattr(beginnings, "POINTS", points)
    monkeypatch.setattr(KnownBeginnings, "least_bytes", points[0])
    monkeypatch.setattr(beginnings, "WORTH_BYTES", 50)


def body(endpoint: Endpoint, said: list[Any], model: str = "m", **members: Any) -> bytes:
    return json.dumps({"model": model, MESSAGES_MEMBER[endpoint]: said, **members}, ensure_ascii=False).encode()


class Reading:
    """Of many bodies in turn, each beside what a proxy that knows nothing makes of it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.frames, self.rules = KnownFrames(endpoint), replace(RULES, hasher=Hasher(SECRET))
        self.known: list[Beginning | None] = []
        self._endpoint = endpoint
        self.frames.request(b"", {}, self.rules)  # of these templates, from now on
        find = self.frames._beginnings.of

        def of(*arguments: Any) -> Begun | None:
            begun = find(*arguments)
            self.known.append(None if begun is None else begun.known)
            return begun

        setattr(self.frames._beginnings, "of", of)  # noqa: B010

    def read(self, data: bytes, rules: ReadingRules | None = None) -> Request | None:
        rules = rules or self.rules
        expected = self._fresh(data, rules)
        found = self.frames.request(data, {}, rules)
        if found is None and expected is not None:
            for _ in range(2):
                self.frames.add(data, parse_request(self._endpoint, data, {}, rules), rules)
            found = self.frames.request(data, {}, rules)
        if found is not None:
            assert expected is not None and shown(found)[:4] == shown(expected)[:4]
        return found

    def _fresh(self, data: bytes, rules: ReadingRules) -> Request | None:
        try:
            return parse_request(self._endpoint, data, {}, replace(rules, hasher=Hasher(SECRET)))
        except RequestError:
            return None


def said_by(random: Random, endpoint: Endpoint) -> Iterator[list[Any]]:
    """Messages or items that clients add to a conversation, some of them odd."""
    ids = ("c1", "c2", "é", "", "c3")
    while True:
        words, id = random.choice(("so", "Über ", "x\\\n")) * random.randint(0, 90), random.choice(ids)
        if random.random() < 0.05:
            words = words * 40  # which can be cut
        if endpoint is Endpoint.RESPONSES:
            yield random.choice(
                (
                    [user(words)],
                    [{"type": "reasoning", "summary": []}, assistant(words)],
                    [{"type": "reasoning", "summary": []}],
                    [{"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"}],
                    [{"type": "function_call", "call_id": at, "name": "f", "arguments": "{}"} for at in (id, "c1")],
                    [{"type": "function_call_output", "call_id": id, "output": words}],
                    [{"type": "web_search_call", "id": "w", "action": {"query": words}}],
                    [assistant([{"type": "output_text", "text": words}]), user([text("a"), text("b")])],
                    [assistant([{"type": "thinking", "thinking": "hm"}, {"type": "output_text", "text": words}])],
                    [user([{"type": "tool_use", "id": id, "name": "f", "input": {}}, text(words)])],
                )
            )
        elif endpoint is Endpoint.MESSAGES:
            use = {"type": "tool_use", "id": id, "name": "f", "input": {"n": words}}
            result = {"type": "tool_result", "tool_use_id": id, "content": words}
            yield random.choice(
                (
                    [user([text(words)])],
                    [assistant(words), user(words)],
                    [assistant([text("I look."), use]), user([result])],
                    [assistant([use, use]), user([result, result, text("and?")])],
                    [user([result])],
                    [assistant([{"type": "thinking", "thinking": words}, text("b")])],
                )
            )
        else:
            yield random.choice(
                (
                    [user(words)],
                    [assistant(words), user(words)],
                    [assistant(tool_calls=[call(id)]), {"role": "tool", "tool_call_id": id, "content": words}],
                    [assistant(tool_calls=[call(id), call(id)]), user("or")],
                    [{"role": "tool", "tool_call_id": id, "content": words}],
                    [assistant(words, reasoning_content="hm"), user([text(words), text("b")])],
                    [{"role": "system", "content": words}],
                    [user([text("a"), PICTURE])] if random.random() < 0.2 else [user("no")],
                )
            )


@pytest.mark.parametrize("endpoint", [*MESSAGES_MEMBER])
def test_conversations_that_grow_and_are_edited_are_read_as_those_that_come_once(endpoint: Endpoint) -> None:
    known = 0
    for seed in range(120):
        random, reading = Random(f"{seed}{endpoint}"), Reading(endpoint)
        more, chat = said_by(random, endpoint), list[Any]()
        first = random.choice(([], [{"role": "system", "content": "Be good. " * 30}], [{"role": "developer"}]))
        members: dict[str, Any] = {"tools": [{"type": "function", "name": "f"}], "temperature": 1}
        for _ in range(14):
            chat += next(more)
            change = random.random()
            if change < 0.1:
                chat[random.randrange(len(chat))] = user("another")
            elif change < 0.15:
                del chat[random.randrange(len(chat)) :]
            elif change < 0.2:
                members["system"] = members["instructions"] = random.choice(("Be bad.", "", None, [text("x" * 2000)]))
            elif change < 0.25:
                members["tools"] = [{"type": "function", "name": name} for name in "fgh"[: random.randint(0, 3)]]
            elif change < 0.3:
                first = [{"role": "system", "content": "Another. " * 200}]
            model = random.choice(("m", "m", "m", "m", "printing", "printed"))
            reading.read(body(endpoint, [*first, *chat], model, **members))
        known += sum(one is not None for one in reading.known)
    assert known > 300, "beginnings are found"


def agents(calls: int, first: str = "Find it. ") -> list[Any]:
    chat: list[Any] = [user(first * 20)]
    for at in range(calls):
        chat.append(assistant("I look.", tool_calls=[call(f"c{at}", arguments=json.dumps({"at": at}))]))
        chat.append({"role": "tool", "tool_call_id": f"c{at}", "content": f"found {at}\n" * 20})
    return chat


CHAT = Endpoint.CHAT


def test_all_but_the_newest_replies_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, read = Reading(CHAT), list[int]()
    find = plane.messages_at

    def messages_at(*arguments: Any, **more: Any) -> Any:
        found = find(*arguments, **more)
        read.append(0 if found is None else len(found[0]))
        return found

    monkeypatch.setattr(plane, "messages_at", messages_at)
    for calls in range(3, 30):
        reading.read(body(CHAT, agents(calls)))
    read.clear()
    assert reading.frames.request(body(CHAT, agents(30)), {}, reading.rules) is not None
    assert read[-1] == 2 * (LEFT_REPLIES + 1), "one call more than the beginning leaves"
    newest = reading.known[-1]
    assert newest is not None and newest.calls == 30 - LEFT_REPLIES - 1


def test_a_client_that_moves_its_cache_control_finds_its_beginning() -> None:
    reading, chat = Reading(Endpoint.MESSAGES), list[Any]()
    for at in range(12):
        marked = {**text(f"{at} and so on. " * 20), "cache_control": {"type": "ephemeral"}}
        chat.append(user([marked]))
        reading.read(body(Endpoint.MESSAGES, chat, max_tokens=9))
        if at:
            chat[-3] = user([text(f"{at - 1} and so on. " * 20)])
        chat.append(assistant(f"{at} so"))
    newest = reading.known[-1]
    assert newest is not None and len(newest.keys) > 10


def test_another_tenants_beginning_is_not_found() -> None:
    reading, data = Reading(CHAT), body(CHAT, agents(9))
    for _ in range(3):
        reading.read(data)
    assert [one is None for one in reading.known] == [True, True, False], "what comes once is not learned"
    other = replace(reading.rules, tenant="u")
    for _ in range(3):
        reading.read(data, other)
    assert [one is None for one in reading.known[-4:]] == [True, True, False, False]


@pytest.mark.parametrize("salt", ["a", "b"])
def test_what_is_behind_the_messages_and_changes_their_keys_is_seen(salt: str) -> None:
    reading = Reading(CHAT)
    for one in ("a", "b", salt, "a"):
        assert reading.read(body(CHAT, agents(9), cache_salt=one)) is not None


def test_templates_that_change_are_read_anew() -> None:
    reading, data = Reading(CHAT), body(CHAT, agents(9))
    for templates in (TEMPLATES, Templates(with_call_ids=("m",)), Templates()):
        for _ in range(2):
            assert reading.read(data, replace(reading.rules, templates=templates)) is not None


def least(frames: KnownFrames, data: bytes, rules: ReadingRules) -> int:
    """What a body must be allowed to weigh."""
    return next(most for most in range(30_000) if frames.request(data, {}, rules, most=most) is not None)


def test_what_a_beginning_weighs_counts_as_when_it_is_read() -> None:
    reading = Reading(CHAT)
    for turn, calls in enumerate(range(6, 40, 3), 1):  # each is known by the one before it
        data = body(CHAT, agents(calls))
        reading.read(data)
        known = reading.frames._beginnings
        weighs = least(reading.frames, data, reading.rules)
        assert weighs >= plane.bones(data)[2]
        reading.frames._beginnings = KnownBeginnings()
        assert 0 <= weighs - least(reading.frames, data, reading.rules) <= turn
        reading.frames._beginnings = known


def test_an_alias_has_the_calls_of_its_own_template() -> None:
    reading, said = Reading(CHAT), agents(9)
    for model in ("m", "m", "m", "printed", "printed", "m"):
        assert reading.read(b'{"messages": %b, "model": "%b"}' % (json.dumps(said).encode(), model.encode()))
    assert all(known is not None for known in reading.known[-3:])


def test_no_beginning_ends_inside_of_a_round_of_calls() -> None:
    """What a message that is no reply has called belongs to the calls behind it, of which one has the same id."""
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    called = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    reading, said = Reading(Endpoint.RESPONSES), [user("a" * 300), assistant("q"), user([use, text("x")]), called]
    for more in ([], [], [], [{"type": "function_call_output", "call_id": "c1", "output": "1"}]):
        said += more
        assert reading.read(body(Endpoint.RESPONSES, said)) is not None


def test_what_is_no_unit_of_its_own_weighs_too() -> None:
    """The system's text, and reasoning."""
    reading, system = Reading(CHAT), {"role": "system", "content": [text(f"{at} {'x' * 20}") for at in range(900)]}
    for calls in (6, 7, 8, 9):
        data = body(CHAT, [system, *agents(calls)])
        reading.read(data)
    assert reading.known[-1] is not None
    assert least(reading.frames, data, reading.rules) >= plane.bones(data)[2] > 2500
    reading, said = Reading(Endpoint.RESPONSES), list[Any]()
    for at in range(12):
        said += [user(f"{at} and so on. " * 20), {"type": "reasoning", "summary": [at] * 200}, assistant("so")]
        data = body(Endpoint.RESPONSES, said)
        reading.read(data)
    assert reading.known[-1] is not None
    assert least(reading.frames, data, reading.rules) >= plane.bones(data)[2] > 2400


def test_reasoning_alone_has_no_beginning() -> None:
    reading, said = Reading(Endpoint.RESPONSES), [{"type": "reasoning", "id": f"r{at}"} for at in range(40)]
    for more in ([], [], [], [], [user("a")], [user("a"), *said]):
        assert reading.read(body(Endpoint.RESPONSES, [*said, *more])) is not None


def test_reasoning_alone_behind_a_beginning_is_read() -> None:
    reading, first = Reading(Endpoint.RESPONSES), [user("a and so on. " * 30), assistant("b")]
    for _ in range(3):
        reading.read(body(Endpoint.RESPONSES, first))
    known = reading.known[-1]
    assert known is not None and len(known.keys) == 1
    assert reading.read(body(Endpoint.RESPONSES, [first[0], {"type": "reasoning", "id": "r"}])) is not None


def test_a_result_of_a_call_that_was_not_read_again_has_its_place() -> None:
    """It answers one of the first calls, so all is read."""
    reading, late = Reading(CHAT), {"role": "tool", "tool_call_id": "c1", "content": "again"}
    for calls in (8, 9):
        reading.read(body(CHAT, agents(calls)))
    assert reading.read(body(CHAT, [*agents(9), late])) is not None
    assert reading.known[-1] is not None


def test_cuts_of_a_beginning_are_made_when_they_are_asked_for() -> None:
    reading, long = Reading(CHAT), [user("It says: " * 1000), *agents(9)]
    for _ in range(3):
        found = reading.read(body(CHAT, long))
    assert found is not None and isinstance(late := found.prompt.chain.long_texts, LateCuts)
    assert late.known, "they were compared"
    again = reading.frames.request(body(CHAT, long), {}, reading.rules)
    assert again is not None and isinstance(late := again.prompt.chain.long_texts, LateCuts)
    assert late.known == () and late.without_text() is None
    assert late.cuts(reading.rules.hasher) == late.known != ()


def test_a_client_that_goes_back_a_turn_is_not_read_twice() -> None:
    """No text of the beginning can be cut, so none of it is looked at."""
    reading, system = Reading(Endpoint.MESSAGES), "Be good. " * 200
    for calls in (9, 10, 11, 10):
        found = reading.read(body(Endpoint.MESSAGES, agents(calls), system=system))
    assert found is not None and reading.known[-1] is not None
    cuts = found.prompt.chain.long_texts
    assert isinstance(cuts, TextCuts) and cuts.known, "of the system's text"


def test_a_body_whose_list_ends_with_a_beginning_is_read() -> None:
    """And one that goes on otherwise behind it, be it JSON or not."""
    reading, said = Reading(CHAT), agents(9)
    for _ in range(3):
        reading.read(body(CHAT, said))
    known = reading.known[-1]
    assert known is not None
    count = len(known.keys)
    for more in ([], [user("no")], [assistant("so")], [5]):
        reading.read(body(CHAT, [*said[:count], *more]))
    whole = body(CHAT, said)
    start = whole.index(b"[") + known.end
    for odd in (b"", b",", b",]", b",{", b"]", b"}", b",{}]", b"x"):
        reading.read(whole[:start] + odd)
    for at in (whole.index(b"["), start):
        for other in b"[,{x":
            data = bytearray(whole)
            data[at] = other
            assert (reading.read(bytes(data)) is None) is (data != whole)


def test_a_beginning_takes_what_it_counts() -> None:
    hasher, many = Hasher(SECRET), 400
    known, data = KnownBeginnings(), [body(CHAT, agents(20, f"{at} ")) for at in range(many)]
    frames = KnownFrames(CHAT)
    rules = replace(RULES, hasher=hasher)
    frames.request(b"", {}, rules)
    for _ in range(2):
        frames.add(data[0], parse_request(CHAT, data[0], {}, rules), rules)
    assert frames.request(data[0], {}, rules) is not None
    frames._beginnings = known
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for one in (*data, *data):
            assert frames.request(one, {}, rules) is not None
        took = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(known) == many
    counted = sum(PLACE_BYTES + len(one) for one in known._kept._newer.values())
    assert 0.9 * counted < took < 1.1 * counted


def test_a_beginning_that_is_learned_anew_counts_once() -> None:
    reading = Reading(CHAT)
    for _ in range(20):
        for model in ("m", "printing"):  # what is behind the messages is not seen as the beginning is looked for
            said = json.dumps(agents(9)).encode()
            reading.read(b'{"messages": %b, "model": "%b"}' % (said, model.encode()))
    kept = reading.frames._beginnings._kept
    assert kept._bytes == sum(PLACE_BYTES + len(one) for one in kept._newer.values())


def test_points_rise_to_the_longest_body() -> None:
    assert all(one < other <= one + max(8192, one // 15) for one, other in pairwise(POINTS))
    assert POINTS[0] == 32 * 1024 and POINTS[-2] < 1 << 20 <= POINTS[-1]


def test_a_chat_without_replies_has_no_beginning() -> None:
    reading, data = Reading(CHAT), body(CHAT, [user(f"{at} and so on") for at in range(900)])
    for _ in range(3):
        assert reading.read(data) is not None
    assert reading.known == [None] * 3 and not len(reading.frames._beginnings)
