"""What the table keeps and for how long: time, room, memory, and keys that never lead nowhere."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from itertools import count, pairwise, permutations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from ppd.proxy.beliefs.held import Residency
from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.peers.turn_replication import CopiesAtOnce
from ppd.proxy.sessions.prefix_chain import Chain, PrefixEnd
from ppd.proxy.sessions.session import KnownPrefix, Prompt, Session, index_keys
from ppd.proxy.sessions.table import EXPIRED_AT_ONCE, MatchKind, SessionMatch, SessionTable, TurnOutcome
from tests.support.attempts import D1, P1
from tests.support.requests import HASHER


def key_of(history: str) -> int:
    return HASHER.key(b"T", history)


def prompt(history: str, name: str = "", opener: str | None = None) -> Prompt:
    """A prompt whose messages, the client's and the worker's in turn, have one letter each."""
    keys = tuple(key_of(history[: length + 1]) for length in range(len(history)))
    chain = Chain(keys, tuple(range(20, 20 * len(keys) + 20, 20)), HASHER)
    named = opener or name
    label = HASHER.key(b"I", named) if named else None
    return Prompt(chain=chain, label=label, opener=opener)


def finish(table: SessionTable, place: SessionMatch, asked: Prompt, history: str, reply: str, now_s: float) -> None:
    outcome = TurnOutcome(
        prompt_tokens=10 * len(history),
        completion_tokens=10,
        reply_key=PrefixEnd(key_of(history + reply)) if reply else None,
        decode=D1,
        prefill=P1,
    )
    table.finish(place, asked, outcome, now_s)


def turn(table: SessionTable, history: str, now_s: float = 0.0, name: str = "", reply: str = "x") -> SessionMatch:
    asked = prompt(history, name)
    place = table.find(asked, now_s)
    finish(table, place, asked, history, reply, now_s)
    return place


def check(table: SessionTable) -> None:
    """Every key leads to a session that is there and remembers it."""
    live = set(map(id, table._sessions.values()))
    for key, session in table._index.items():
        assert id(session) in live
        assert key in index_keys(session)
    for label, session in table._renamed.items():
        assert id(session) in live
        assert session.label == label != session.history
    for history, session in table._sessions.items():
        assert session.history == history
    seen = [session.seen_s for session in table._sessions.values()]
    assert all(earlier <= later for earlier, later in pairwise(seen))


def test_a_session_is_forgotten_after_its_time_without_use() -> None:
    table = SessionTable(ttl_s=3600.0, capacity=10)
    turn(table, "a")
    assert table.find(prompt("axb"), 3600.0).turn == 2  # a use, though its turn may fail
    assert table.find(prompt("axb"), 7200.0).turn == 2
    assert table.find(prompt("axb"), 10_801.0).turn == 1
    assert len(table) == 0
    check(table)


def test_a_session_adopted_late_goes_when_its_own_time_is_over() -> None:
    table, other = SessionTable(ttl_s=10.0, capacity=5), SessionTable(ttl_s=10.0, capacity=5, serials=count(1 << 40))
    turn(other, "b", now_s=91.0)
    turn(table, "a", now_s=100.0)
    (theirs,) = other.all()
    table.adopt(theirs, *other.lookup_keys(theirs))
    turn(table, "axm", now_s=100.5)
    assert table.find(prompt("bxm"), 102.0).kind is MatchKind.FIRST
    check(table)


@pytest.mark.parametrize(
    "changes",
    [
        {"packed": b""},
        {"packed": b"x" * 18},
        {"packed": b"x" * 500},
        {"packed": b"\xff" * (17 + 25)},
        {"packed": b"\xff" * (17 + 25 + 14)},
        {"packed_prefixes": b"x" * 41},
    ],
)
def test_a_session_in_the_layout_of_another_version_is_not_adopted(changes: dict[str, bytes]) -> None:
    table, other = SessionTable(ttl_s=10.0, capacity=5), SessionTable(ttl_s=10.0, capacity=5, serials=count(1 << 40))
    turn(table, "a")
    turn(other, "b", now_s=1.0)
    (theirs,) = other.all()
    label, keys = other.lookup_keys(theirs)
    table.adopt(replace(theirs, **changes), label, keys)
    assert len(table) == 1
    check(table)
    assert table.find(prompt("axm"), 1.0).kind is MatchKind.NEXT


def test_a_session_without_units_is_found_by_its_ends() -> None:
    """A sibling of an older version keeps none."""
    table = SessionTable(ttl_s=10.0, capacity=5)
    old = Session(7, None, turn=2)
    ends = [
        KnownPrefix.at(PrefixEnd(key_of("axb")), 2, 30, is_prompt=True),
        KnownPrefix.at(PrefixEnd(key_of("axby")), 2, 40),
    ]
    old.learn(10.0, D1, None)
    old.keep_prefixes(ends)
    table.adopt(old, None, index_keys(old))
    check(table)
    retry, following = (table.find(prompt(text), 0.0) for text in ("axb", "axbyc"))
    assert [(one.kind, one.turn, one.held_tokens) for one in (retry, following)] == [
        (MatchKind.RETRY, 2, 30),
        (MatchKind.NEXT, 3, 40),
    ]
    turn(table, "axbyc")
    assert table.find(prompt("axbyd"), 0.0).held_tokens == 40
    check(table)


def test_of_states_that_come_in_any_order_the_newest_stays() -> None:
    table, other = SessionTable(ttl_s=100.0, capacity=5), SessionTable(ttl_s=100.0, capacity=5, serials=count(1 << 40))
    states = []
    for number, history in enumerate(("a", "axb", "axbxc"), start=1):
        turn(other, history, now_s=float(number))
        (session,) = other.all()
        states.append((replace(session), *other.lookup_keys(session)))
    for order in permutations(states):
        table = SessionTable(ttl_s=100.0, capacity=5)
        for state, label, keys in order:
            table.adopt(replace(state), label, keys)
            check(table)
        assert table.find(prompt("axbxcxd"), 3.0).turn == 4
        assert len(table) == 1


def telling() -> tuple[SessionTable, list[tuple[Session, int | None, set[int]]]]:
    """A table of another process, and what that tells of it."""
    table, told = (
        SessionTable(ttl_s=100.0, capacity=5, serials=count(1 << 40)),
        list[tuple[Session, int | None, set[int]]](),
    )
    table.replicated = CopiesAtOnce(
        lambda: None,
        lambda session, label, keys, _: told.append((replace(session), label, set(keys))),
        *(lambda: None, lambda: asyncio.sleep(0)),
    )
    return table, told


def test_what_is_told_of_a_session_may_come_in_any_order() -> None:
    """Its turns were served by several processes, whose words are read one process after the other."""
    other, told = telling()
    for number, history in enumerate(("a", "axb", "axbxc"), start=1):
        turn(other, history, now_s=float(number))
    for order in permutations(told):
        table = SessionTable(ttl_s=100.0, capacity=5)
        for state, label, keys in order:
            table.adopt(replace(state), label, keys)
            check(table)
        assert set(table._index) == set(other._index)
        edited = table.find(prompt("axn"), 3.0)
        assert (edited.kind, edited.turn, edited.held_tokens) == (MatchKind.BRANCH, 2, 20)


@pytest.mark.parametrize("is_late", [True, False])
def test_a_word_that_comes_late_takes_no_prefix_from_a_newer_session(is_late: bool) -> None:
    other, told = telling()
    for number, (history, reply) in enumerate((("a", "x"), ("axb", "x"), ("a", "y")), start=1):
        turn(other, history, now_s=float(number), reply=reply)
    first, second, branch = told
    table = SessionTable(ttl_s=100.0, capacity=5)
    for state, label, keys in (second, branch, first) if is_late else (second, first, branch):
        table.adopt(state, label, keys)
        check(table)
    assert {key: session.history for key, session in table._index.items()} == {
        key: session.history for key, session in other._index.items()
    }


def test_a_turn_that_is_finished_twice_is_one() -> None:
    table = SessionTable(ttl_s=10.0, capacity=5)
    turn(table, "a")
    asked = prompt("axb")
    place = table.find(asked, 0.0)
    for _ in range(3):
        finish(table, place, asked, "axb", "y", 0.0)
        check(table)
    following = table.find(prompt("axbyc"), 0.0)
    assert (following.turn, following.held_tokens) == (3, 40)


def test_the_session_unused_for_longest_makes_room() -> None:
    table = SessionTable(ttl_s=10.0, capacity=2)
    turn(table, "a")
    turn(table, "b")
    table.find(prompt("axm"), 0.0)
    turn(table, "c")
    kinds = {text: table.find(prompt(f"{text}xm"), 0.0).kind for text in "abc"}
    assert kinds == {"a": MatchKind.NEXT, "b": MatchKind.FIRST, "c": MatchKind.NEXT}
    check(table)


def test_a_session_forgotten_during_its_turn_is_learnt_anew() -> None:
    table = SessionTable(ttl_s=10.0, capacity=5)
    turn(table, "a")
    asked = prompt("axb")
    place = table.find(asked, 5.0)
    finish(table, place, asked, "axb", "y", 100.0)
    following = table.find(prompt("axbyc"), 100.0)
    assert (following.turn, following.decode, following.session_id) == (3, D1, place.session_id)


def test_of_many_sessions_that_begin_a_prompt_the_one_with_the_most_is_found() -> None:
    table = SessionTable(ttl_s=10.0, capacity=1000)
    text = "ab" * 200
    for length in range(1, len(text), 2):
        asked = prompt(text[:length], str(length))  # names keep them apart
        finish(table, table.find(asked, 0.0), asked, text[:length], "", 0.0)
    assert len(table) == 200
    found = table.find(prompt(text + "c"), 0.0)
    assert found.held_tokens == 10 * (len(text) - 1)
    check(table)


def test_a_dropped_session_is_gone_with_all_its_histories() -> None:
    table = SessionTable(ttl_s=10.0, capacity=5)
    first = turn(table, "a", name="1")
    turn(table, "b", name="1")
    turn(table, "c")
    assert len(table) == 3
    assert table.drop(first.session_id)
    assert not table.drop(first.session_id)
    assert (len(table), table.summary(first.session_id)) == (1, None)
    check(table)


def test_a_session_that_got_another_name_during_a_turn_does_not_grow_by_it() -> None:
    table = SessionTable(ttl_s=10.0, capacity=5)
    turn(table, "a")
    asked = prompt("axb", "ann")
    place = table.find(asked, 0.0)
    assert place.kind is MatchKind.NEXT
    retry = turn(table, "a", name="bob")
    finish(table, place, asked, "axb", "y", 0.0)
    check(table)
    assert len(table) == 2
    assert table.find(prompt("axbyc", "ann"), 0.0).turn == 3
    following = table.find(prompt("axb", "bob"), 0.0)
    assert (following.kind, following.session_id) == (MatchKind.NEXT, retry.session_id)


def test_an_operator_sees_the_newest_sessions_first() -> None:
    table = SessionTable(ttl_s=10.0, capacity=5)
    first, second = turn(table, "a"), turn(table, "b")
    turn(table, "axm", now_s=7.0)
    assert [one.session_id for one in table.recent(5)] == [first.session_id, second.session_id]
    assert len(table.recent(1)) == 1
    summary = table.summary(first.session_id)
    assert summary is not None
    assert (summary.turn, summary.held_tokens, summary.seen_s) == (2, 40, 7.0)
    assert (summary.decode, summary.prefill) == (D1.worker, P1.worker)
    assert table.summary("no such session") is None


def test_session_ids_spread_over_their_first_digits() -> None:
    table = SessionTable(ttl_s=10.0, capacity=5)
    shares = [int(table.find(prompt(chr(200 + n)), 0.0).session_id[:8], 16) / 2**32 for n in range(400)]
    assert 160 < sum(share < 0.5 for share in shares) < 240


@pytest.mark.parametrize(("ttl_s", "capacity"), [(0.0, 1), (1.0, 0)])
def test_a_table_must_be_able_to_hold_something(ttl_s: float, capacity: int) -> None:
    with pytest.raises(ConfigError):
        SessionTable(ttl_s=ttl_s, capacity=capacity)


class Talk(RuleBasedStateMachine):
    """Any order of finds, finishes and passing time, with few texts and names so that all of them collide."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SessionTable(ttl_s=50.0, capacity=4)
        self.now_s = 0.0
        self.running: list[tuple[SessionMatch, Prompt, str]] = []

    @rule(
        history=st.text("ab", min_size=1, max_size=5),
        name=st.sampled_from(["", "", "1", "2"]),
        opener=st.sampled_from([None, None, "a"]),
    )
    def find(self, history: str, name: str, opener: str | None) -> None:
        asked = prompt(history, name, opener)
        place = self.table.find(asked, self.now_s)
        assert place.turn >= 1
        assert 0 <= place.new_bytes <= asked.chain.size
        assert place.held_tokens == 0 or place.parent is not None
        assert place.kind is not MatchKind.NEXT or place.turn > 1
        self.running.append((place, asked, history))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reply=st.sampled_from(["", "a", "b"]))
    def finish(self, data: st.DataObject, reply: str) -> None:
        place, asked, history = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        finish(self.table, place, asked, history, reply, self.now_s)
        assert self.table.recent(1)[0].turn == place.turn

    @precondition(lambda self: len(self.table) > 0)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        assert self.table.drop(data.draw(st.sampled_from(self.table.recent(10))).session_id)

    @rule(seconds=st.sampled_from([1.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def holds_together(self) -> None:
        assert len(self.table) <= 4
        check(self.table)


TestTalk = Talk.TestCase


@pytest.mark.slow
def test_an_idle_session_takes_at_most_1200_bytes() -> None:
    """Ten turns, a name, and two workers that hold its prefix; benchmarks/small/session_memory.py measures the same."""
    count, turns = 100, 10
    workers = [(WorkerId(f"10.0.0.{number}:8000"), f"incarnation {number}") for number in range(8)]
    table = SessionTable(ttl_s=60.0, capacity=count)
    tracemalloc.start()
    try:
        before = _traced_bytes()
        for number in range(count):
            _play(table, number, turns, workers)
        after = _traced_bytes()
    finally:
        tracemalloc.stop()
    assert len(table) == count
    assert {summary.turn for summary in table.recent(count)} == {turns}
    assert (after - before) / count <= 1200


def _traced_bytes() -> int:
    """Bytes in use, without the interpreter's free lists: a full collection empties them."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _play(table: SessionTable, number: int, turns: int, workers: list[tuple[WorkerId, str]]) -> None:
    keys: tuple[int, ...] = ()
    for number_of_turn in range(1, turns + 1):
        keys += (HASHER.key(b"T", f"{number} {number_of_turn} prompt"),)
        chain = Chain(keys, tuple(range(20, 20 * len(keys) + 20, 20)), HASHER)
        asked = Prompt(chain=chain, label=HASHER.key(b"I", str(number)))
        keys += (HASHER.key(b"T", f"{number} {number_of_turn} reply"),)
        held = Residency(*workers[number % 8], 1000 * number_of_turn + number)
        outcome = TurnOutcome(
            prompt_tokens=1000 * number_of_turn,
            completion_tokens=300 + number,
            reply_key=PrefixEnd(keys[-1]),
            decode=held,
            prefill=replace(held, worker=workers[(number + 1) % 8][0]),
        )
        table.finish(table.find(asked, 0.0), asked, outcome, 0.0)


def test_sessions_expire_in_steps_and_none_is_found_meanwhile() -> None:
    count = 5 * EXPIRED_AT_ONCE
    table = SessionTable(ttl_s=10.0, capacity=2 * count)
    texts = [chr(0x4E00 + number) for number in range(count)]
    for text in texts:
        turn(table, text, name=text)
    assert len(table) == count
    place = table.find(prompt(f"{texts[-1]}xm", texts[-1]), 100.0)  # the last to be dropped
    assert (place.kind, place.turn) == (MatchKind.FIRST, 1)
    assert count - len(table) == EXPIRED_AT_ONCE
    assert table.find(prompt(f"{texts[-1]}xm"), 100.0).kind is MatchKind.FIRST
    for _ in range(4):
        turn(table, "a", now_s=101.0)
    assert len(table) == 1
    check(table)
