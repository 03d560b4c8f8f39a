"""Which session a request continues, at which turn, and which worker holds how much of it.

The table keeps keys, counts and worker names, never text. A request's parent is the longest of its prefixes that was
once a whole prompt, or a prompt with its reply:

1. The parent is the newest turn of its session: NEXT, the session grows by a turn.
2. The parent is an older turn, or belongs to a session of another name: BRANCH, a new session from there on.
3. The whole request is the newest prompt of its session: RETRY, the same turn again. If it gets another reply, a new
   session begins there: two users with one opener are two sessions from their second turn on.
4. No prefix is known: FIRST; or LOST, if the client names a known conversation that begins otherwise.

A client's id only names a conversation: what workers hold is decided by prefixes alone. So several *histories* may
share one id (an agent's helpers, an edit, a key that an application shares among its users). Each is found by its own
prefixes.

A session remembers its newest turn (the prompt, and the prompt with its reply), the four turns before it, and its
first. Each earlier turn is kept as the prefix that the next turn grew from; more does not fit into the 1 KiB of an idle
session. An edit of a turn that is no longer remembered becomes a branch of the first turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum
from operator import attrgetter

import msgspec

from ..beliefs.beliefs import Beliefs
from ..beliefs.held import Residency
from ..errors import ConfigError
from ..fleet.worker import WorkerId
from ..runtime.replicated import Replicated
from .prefix_chain import KEY_BITS, PrefixEnd
from .session import (
    KnownPrefix,
    Prompt,
    Session,
    SessionSummary,
    hexadecimal,
    index_keys,
    marks_of_prompt,
    remembered,
    response_key,
    summary_of,
)
from .token_estimates import decayed_mean

EXPIRED_AT_ONCE = 32  # sessions dropped by one turn: two microseconds each
_OUTPUT_DECAY = 0.7  # a session's answers change with its task: the last three or four count
_SPREAD = 0x9E3779B97F4A7C15  # odd, so that successive ids differ in all bits


class MatchKind(StrEnum):
    FIRST = "first"
    NEXT = "next"
    RETRY = "retry"
    BRANCH = "branch"
    LOST = "lost"


class SessionMatch(msgspec.Struct, frozen=True, kw_only=True):
    """What `find` tells of a request: its session and turn, and what is known to be held of its prompt."""

    session_id: str  # hexadecimal
    turn: int  # 1-based
    kind: MatchKind
    held_tokens: int  # of the known prefix, as the worker counted them; 0 without one
    new_bytes: int  # of the prompt, beyond that prefix
    decode: Residency | None = None  # after the session's last turn
    output_tokens: float | None = None  # mean length of this session's answers
    history: int  # histories under one id share `session_id`
    source: int | None = None  # the history whose entries in the workers' books cover the known prefix
    parent: int | None = None  # key of the known prefix


class TurnOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a completed turn taught. A residency of None leaves the known one as it is."""

    prompt_tokens: int
    completion_tokens: int
    reply_key: PrefixEnd | None = None
    response_id: str | None = None
    decode: Residency | None = None
    prefill: Residency | None = None
    reasoned: bool = False  # the reply held reasoning, whose tokens are not in the next prompt


class _PrefixMatch(msgspec.Struct, frozen=True, gc=False):
    session: Session
    prefix: KnownPrefix
    covered: int  # bytes of the request's prompt


_COVERED = attrgetter("covered")


class SessionTable:
    """All sessions; `now_s` must never decrease. `find` changes nothing but a session's time of last use."""

    def __init__(self, *, ttl_s: float, capacity: int, serial: int = 0, beliefs: Beliefs | None = None) -> None:
        """serial: where this process's session numbers begin; other processes' begin elsewhere."""
        if ttl_s <= 0 or capacity < 1:
            raise ConfigError(f"sessions need a ttl_s above 0 and a capacity of at least 1, not {ttl_s} and {capacity}")
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._sessions: OrderedDict[int, Session] = OrderedDict()  # by history, least recently used first
        self._named: dict[int, Session] = {}  # the newest history of each label
        self._index: dict[int, Session] = {}  # by prefix key, the newest session that has it
        self._serial = serial
        self._beliefs = beliefs or Beliefs(lambda worker: None)
        self.replicated: Replicated[Session, int | None, set[int]] | None = None  # `changed` takes what `adopt` takes

    def __len__(self) -> int:
        return len(self._sessions)

    # -- the two ends of a turn

    def find(self, prompt: Prompt, now_s: float) -> SessionMatch:
        if self.replicated is not None:
            self.replicated.catch_up()
        self._expire(now_s)
        named = None if prompt.label is None else self._named.get(prompt.label)
        if named is not None and self._has_expired(named, now_s):
            named = None
        if prompt.opener is not None:
            return self._match_by_count(prompt, named, now_s)
        match = self._match(prompt, named, now_s)
        self._touch(self._sessions.get(match.history), now_s)
        return match

    def finish(self, match: SessionMatch, prompt: Prompt, outcome: TurnOutcome, now_s: float) -> None:
        """Only for a turn that completed: one that failed or was cancelled teaches nothing."""
        if self.replicated is not None:
            self.replicated.catch_up()
        known = self._sessions.get(match.history)
        known_prefixes = known.prefixes() if known else []
        if known and _still_there(known, known_prefixes, match, prompt, outcome):
            session = known
        else:
            session, known_prefixes = self._add(match, prompt), []
        before = index_keys(known_prefixes, session.turn)
        prefixes = remembered(known_prefixes, match.turn, match.parent) + _new_prefixes(match, prompt, outcome)
        after = index_keys(prefixes, match.turn)
        self._unlink(session, before - after)
        self._index.update(dict.fromkeys(after - before, session))
        session.turn = match.turn
        output_tokens = decayed_mean(session.output_tokens, outcome.completion_tokens, _OUTPUT_DECAY)
        session.learn(output_tokens, outcome.decode, outcome.prefill, prefixes)
        if session is not known:
            session.marks = marks_of_prompt(prompt, outcome.prompt_tokens)
        self._beliefs.ended(session.history, (outcome.decode, outcome.prefill), session.marks)
        self._name(session, prompt.label)
        self._touch(session, now_s)
        if self.replicated is not None:
            self.replicated.changed(session, prompt.label, after - before)
        self._expire(now_s)

    def adopt(self, theirs: Session, label: int | None, keys: Iterable[int]) -> None:
        """Takes over a session from another process. If both ended a turn of it at once, the later one counts.

        label: the name by which it is found from now on, if it was given one. keys: those that now lead to it.
        """
        ours = self._sessions.get(theirs.history)
        _, decode, prefill = theirs.learnt()
        if ours is not None:
            if ours.seen_s > theirs.seen_s and ours.turn >= theirs.turn:
                return
            after = index_keys(theirs.prefixes(), theirs.turn)
            for key in index_keys(ours.prefixes(), ours.turn):
                if self._index.get(key) is ours:
                    if key in after:
                        self._index[key] = theirs
                    else:
                        del self._index[key]
            if ours.label is not None and self._named.get(ours.label) is ours:
                self._named[ours.label] = theirs
            if ours.learnt()[2] == prefill:
                prefill = None  # its turn had no P
        self._beliefs.ended(theirs.history, (decode, prefill), theirs.marks)
        self._index.update(dict.fromkeys(keys, theirs))
        if label is not None:
            self._named[label] = theirs
        self._sessions[theirs.history] = theirs
        self._sessions.move_to_end(theirs.history)
        self._expire(theirs.seen_s)

    def holder(self, key: int) -> WorkerId | None:
        """The D of the newest session with this prefix, as a stored response's; None where none is known."""
        session = self._index.get(key)
        decode = None if session is None else session.learnt()[1]
        return None if decode is None else decode.worker

    def lookup_keys(self, session: Session) -> tuple[int | None, list[int]]:
        label = session.label if session.label is not None and self._named.get(session.label) is session else None
        keys = index_keys(session.prefixes(), session.turn)
        return label, [key for key in keys if self._index.get(key) is session]

    def all(self) -> list[Session]:
        """Least recently used first."""
        return list(self._sessions.values())

    # -- for the operator

    def drop(self, session_id: str) -> bool:
        found = [session for session in self._sessions.values() if session.id == session_id]
        for session in found:
            self._forget(session)
        return bool(found)

    def summary(self, session_id: str) -> SessionSummary | None:
        """Of the history that was used last."""
        session = next((one for one in reversed(self._sessions.values()) if one.id == session_id), None)
        return None if session is None else summary_of(session)

    def recent(self, limit: int) -> list[SessionSummary]:
        newest = reversed(self._sessions.values())
        return [summary_of(session) for _, session in zip(range(limit), newest, strict=False)]

    # -- finding

    def _match(self, prompt: Prompt, named: Session | None, now_s: float) -> SessionMatch:
        candidates = self._known_prefixes(prompt, named, now_s)
        found = next(candidates, None)
        if found is not None and found.prefix.is_prompt and found.covered == prompt.chain.size:
            parent = next((shorter for shorter in candidates if shorter.covered < found.covered), None)
            if _may_grow(found, prompt, named):
                return _matched(MatchKind.RETRY, found.session, found.prefix.turn, prompt, parent)
            found = parent  # that turn again, but in a session of its own
        if found is None:
            lost = named is not None or prompt.previous_response_id is not None
            return self._unmatched(MatchKind.LOST if lost else MatchKind.FIRST, prompt, named)
        if _may_grow(found, prompt, named):
            return _matched(MatchKind.NEXT, found.session, found.prefix.turn + 1, prompt, found)
        branch = Session(self._new_history(prompt), prompt.label)
        output_tokens, decode, _ = found.session.learnt()
        branch.learn(output_tokens, decode, None)
        return _matched(MatchKind.BRANCH, branch, found.prefix.turn + 1, prompt, found)

    def _unmatched(self, kind: MatchKind, prompt: Prompt, named: Session | None) -> SessionMatch:
        """No prefix is known. Under a known id the turns count on, but nothing is believed to be held."""
        new = Session(self._new_history(prompt), prompt.label)
        if named is not None:
            new.learn(named.output_tokens, None, None)
        return _matched(kind, new, named.turn + 1 if named else 1, prompt, None)

    def _match_by_count(self, prompt: Prompt, session: Session | None, now_s: float) -> SessionMatch:
        """The paper's rule: the opener is the session, each request with it a turn, and all of its history is held."""
        if session is None:
            return self._unmatched(MatchKind.FIRST, prompt, None)
        self._touch(session, now_s)
        prefixes = session.prefixes()
        end = prompt.chain.end()
        is_retry = any(one.is_prompt and one.turn == session.turn and one.end == end for one in prefixes)
        kind, turn = (MatchKind.RETRY, session.turn) if is_retry else (MatchKind.NEXT, session.turn + 1)
        parent = max((one for one in prefixes if one.turn < turn), key=lambda one: one.tokens, default=None)
        if parent is None:
            return _matched(kind, session, turn, prompt, None)
        # The new turn adds what lies beyond the known prefix; without one, the last message.
        ends = prompt.chain.ends
        known = next(
            (found.covered for found in self._known_prefixes(prompt, session, now_s) if found.prefix.turn < turn), None
        )
        covered = known if known is not None else ends[-2] if len(ends) > 1 else 0
        return _matched(kind, session, turn, prompt, _PrefixMatch(session, parent, covered))

    def _known_prefixes(self, prompt: Prompt, named: Session | None, now_s: float) -> Iterator[_PrefixMatch]:
        """The prompt's known prefixes, longest first; of equal ones the named session's comes first."""
        chain, index = prompt.chain, self._index
        positions = dict(zip(chain.keys, range(len(chain.keys)), strict=True))
        known: Collection[int] = index.keys() & positions.keys()
        if len(known) > 1:
            known = sorted(known, key=positions.__getitem__, reverse=True)  # the longest prefix's session first
        sessions = [session for key in known if not self._has_expired(session := index[key], now_s)]
        if named is not None:
            sessions.insert(0, named)
        found = []
        for session in dict.fromkeys(sessions):
            for prefix in session.prefixes():
                position = positions.get(prefix.key)
                covered = None if position is None else chain.reach(position, prefix.tail, prefix.check)
                if covered is not None:
                    found.append(_PrefixMatch(session, prefix, covered))
        found.sort(key=_COVERED, reverse=True)
        return iter(found)

    # -- keeping

    def _add(self, match: SessionMatch, prompt: Prompt) -> Session:
        history = match.history if match.history not in self._sessions else self._new_history(prompt)
        session = Session(history, prompt.label)
        if match.kind is not MatchKind.FIRST:  # which has learnt nothing yet
            session.learn(match.output_tokens, match.decode, None)
        self._sessions[history] = session
        return session

    def _new_history(self, prompt: Prompt) -> int:
        if prompt.label is not None and prompt.label not in self._sessions:
            return prompt.label
        while True:  # else a number that no client can foretell
            self._serial += 1
            history = (prompt.chain.keys[-1] ^ (self._serial * _SPREAD)) & ((1 << KEY_BITS) - 1)
            if history not in self._sessions:
                return history

    def _name(self, session: Session, label: int | None) -> None:
        if label is not None:
            if session.label is None:
                session.label = label
            self._named[label] = session

    def _touch(self, session: Session | None, now_s: float) -> None:
        if session is not None:
            session.seen_s = now_s
            self._sessions.move_to_end(session.history)

    def _has_expired(self, session: Session, now_s: float) -> bool:
        return now_s - session.seen_s > self._ttl_s

    def _expire(self, now_s: float) -> None:
        """In steps, for the turn that comes after a long pause; it finds no expired session, dropped or not."""
        for _ in range(min(EXPIRED_AT_ONCE, len(self._sessions))):
            oldest = next(iter(self._sessions.values()))
            if len(self._sessions) <= self._capacity and not self._has_expired(oldest, now_s):
                return
            self._forget(oldest)

    def _forget(self, session: Session) -> None:
        del self._sessions[session.history]
        self._unlink(session, index_keys(session.prefixes(), session.turn))
        if session.label is not None and self._named.get(session.label) is session:
            del self._named[session.label]
        self._beliefs.forget(session.history, (session.decode, session.prefill))

    def _unlink(self, session: Session, keys: set[int]) -> None:
        for key in keys:
            if self._index.get(key) is session:
                del self._index[key]


def _may_grow(found: _PrefixMatch, prompt: Prompt, named: Session | None) -> bool:
    """Whether the request continues the very session that has its parent.

    The parent must be that session's newest turn, and the labels must agree: a session without a label takes the first
    that it is given, unless another session has that label already.
    """
    session, label = found.session, prompt.label
    if found.prefix.turn != session.turn:
        return False
    return label is None or label == session.label or (session.label is None and named is None)


def _still_there(
    session: Session, prefixes: Iterable[KnownPrefix], match: SessionMatch, prompt: Prompt, outcome: TurnOutcome
) -> bool:
    """Whether the session is still as `find` saw it: another turn of it may have ended since."""
    if prompt.opener is not None:
        return match.turn >= session.turn
    if prompt.label is not None and session.label not in (None, prompt.label):
        return False  # it was given another name meanwhile
    newest = [prefix for prefix in prefixes if prefix.turn == session.turn]
    if match.kind is MatchKind.NEXT:
        return session.turn == match.turn - 1 and match.parent in [prefix.key for prefix in newest]
    if match.kind is not MatchKind.RETRY or session.turn != match.turn:
        return False
    replies = [prefix.end for prefix in newest if not prefix.is_prompt]
    same_reply = not replies or outcome.reply_key is None or outcome.reply_key in replies
    return same_reply and any(prefix.is_prompt and prefix.end == prompt.chain.end() for prefix in newest)


def _new_prefixes(match: SessionMatch, prompt: Prompt, outcome: TurnOutcome) -> list[KnownPrefix]:
    prompt_tokens, both = outcome.prompt_tokens, outcome.prompt_tokens + outcome.completion_tokens
    prefixes = []
    if prompt.chain.size > 0:
        prefixes.append(KnownPrefix.at(prompt.chain.end(), match.turn, prompt_tokens, is_prompt=True))
    if outcome.reply_key is not None:
        prefixes.append(KnownPrefix.at(outcome.reply_key, match.turn, prompt_tokens if outcome.reasoned else both))
    if outcome.response_id is not None and prompt.response_scope is not None:
        stored = PrefixEnd(response_key(prompt.chain.hasher, prompt.response_scope, outcome.response_id))
        prefixes.append(KnownPrefix.at(stored, match.turn, both, is_stored=True))
    return prefixes


def _matched(kind: MatchKind, session: Session, turn: int, prompt: Prompt, parent: _PrefixMatch | None) -> SessionMatch:
    output_tokens, decode, _ = session.learnt()
    return SessionMatch(
        session_id=session.id if prompt.label is None else hexadecimal(prompt.label),
        turn=turn,
        kind=kind,
        held_tokens=parent.prefix.tokens if parent else 0,
        new_bytes=prompt.chain.size - (parent.covered if parent else 0),
        decode=decode,
        output_tokens=output_tokens,
        history=session.history,
        source=parent.session.history if parent else None,
        parent=parent.prefix.key if parent else None,
    )
