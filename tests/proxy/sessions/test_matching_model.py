"""The table against a naive one that keeps every unit of every session's newest prompt and reply."""

from __future__ import annotations

from itertools import count, takewhile
from operator import eq

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from ppd.proxy.sessions.prefix_chain import Chain, PrefixEnd
from ppd.proxy.sessions.session import Prompt, Session
from ppd.proxy.sessions.table import MatchKind, SessionMatch, SessionTable, TurnOutcome
from tests.support.attempts import D1
from tests.support.requests import HASHER

UNIT_TOKENS = 300  # above `LEAST_SHARED`, so that one unit is worth a branch


def prompt(text: str, name: str) -> Prompt:
    """One unit a letter, of 20 bytes."""
    keys = [HASHER.key(b"S", "")] + [HASHER.key(b"T", text[: length + 1]) for length in range(len(text))]
    ends = range(0, 20 * len(keys), 20)
    return Prompt(chain=Chain(tuple(keys), tuple(ends), HASHER), label=HASHER.key(b"I", name) if name else None)


def common(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(bool, map(eq, one, other)))


class Talk(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = SessionTable(ttl_s=1000.0, capacity=100)
        self.sibling = SessionTable(ttl_s=1000.0, capacity=100, serials=count(1 << 40))
        self.asked: dict[int, tuple[str, str]] = {}  # the newest prompt and reply of each history
        self.running: list[tuple[SessionMatch, str, str]] = []

    @rule(text=st.text("ab", min_size=1, max_size=9), name=st.sampled_from(["", "", "1", "2"]))
    def find(self, text: str, name: str) -> None:
        self._check(text, name, self.table.find(prompt(text, name), 0.0))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), more=st.text("ab", max_size=3), name=st.sampled_from(["", "", "1"]))
    def go_on(self, data: st.DataObject, more: str, name: str) -> None:
        said, reply = self.asked[data.draw(st.sampled_from(sorted(self.asked)))]
        text = said + reply + more
        match = self.table.find(prompt(text, name), 0.0)
        self._check(text, name, match)
        assert match.held_tokens >= 0

    def _check(self, text: str, name: str, match: SessionMatch) -> None:
        if match.kind in (MatchKind.FIRST, MatchKind.LOST):
            assert (match.held_tokens, match.new_bytes, match.source) == (0, 20 * len(text), None)
        else:
            assert match.source is not None
            said, reply = self.asked[match.source]
            shared = common(text, said + reply)
            assert match.held_tokens == UNIT_TOKENS * shared
            assert match.new_bytes == 20 * (len(text) - shared)
            assert (match.kind is MatchKind.RETRY) <= (text == said)
            assert (match.kind is MatchKind.BRANCH) == (match.history not in self.asked)
        if len(self.asked) == 1:  # then the index cannot lead to another session
            ((said, reply),) = self.asked.values()
            assert match.held_tokens == UNIT_TOKENS * common(text, said + reply)
        self.running.append((match, text, name))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reply=st.sampled_from(["", "a", "b"]), is_again=st.booleans())
    def finish(self, data: st.DataObject, reply: str, is_again: bool) -> None:
        at = data.draw(st.integers(0, len(self.running) - 1))
        match, text, name = self.running[at] if is_again else self.running.pop(at)
        key = PrefixEnd(HASHER.key(b"T", text + reply)) if reply else None
        used = UNIT_TOKENS * len(text)
        outcome = TurnOutcome(prompt_tokens=used, completion_tokens=UNIT_TOKENS, reply_key=key, decode=D1)
        self.table.finish(match, prompt(text, name), outcome, 0.0)
        newest = self.table.all()[-1]
        self.asked[newest.history] = text, reply
        self.sibling.adopt(_sent(newest), *self.table.lookup_keys(newest))

    @rule(text=st.text("ab", min_size=1, max_size=9))
    def a_sibling_finds_the_same(self, text: str) -> None:
        here, there = (table.find(prompt(text, ""), 0.0) for table in (self.table, self.sibling))
        assert (here.kind, here.turn, here.held_tokens) == (there.kind, there.turn, there.held_tokens)


def _sent(session: Session) -> Session:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(session), type=Session)


TestTalk = Talk.TestCase
TestTalk.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
