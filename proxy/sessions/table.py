"""Which session a request continues, at which turn, and which worker holds how much of it.

The table keeps keys, counts and worker names, never text. Of each session it has the units of the newest prompt and the
reply (`kept_units`), and the index leads to a session by a few of their keys: the first message by the user and cuts of
its text, all but the newest message, the newest reply, a stored response. `matching` says what a request is to the
session that has most in common with it. No session has anything in common: FIRST; or LOST, if the client names a known
conversation that begins otherwise.

A client's id only names a conversation: what workers hold is decided by prefixes alone. So several *histories* may
share one id (an agent's helpers, an edit, a key that an application shares among its users). Each is found by its own
prefixes. What a named conversation lost is computed where the rest of it is (`SessionMatch.affinity`).

Of sessions with one opener the index knows the newest. So an edit of an old turn may be placed in another session than
its own, as far as that has the same start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import count, islice

from ..beliefs.beliefs import Beliefs
from ..errors import ConfigError
from ..fleet.worker import WorkerId
from ..runtime.replicated import ReplicatedAtOnce
from .hasher import KEY_BITS
from .kept_units import NO_UNITS_KEPT, KeptUnits, TurnOutcome, pack
from .matching import (
    NEXT,
    Common,
    KnownPart,
    MatchKind,
    SessionMatch,
    common,
    is_same,
    judge,
    matched,
    newest_end,
    still_there,
    units_of,
)
from .prefix_chain import Chain, PrefixEnd
from .rendered_replies import RenderedReplies
from .session import (
    KnownPrefix,
    Prompt,
    Session,
    SessionSummary,
    held_tokens,
    index_keys,
    marks_of_prompt,
    points_of_prompt,
    response_key,
    summary_of,
)
from .text_cuts import cuts_of, head_points
from .token_estimates import output_mean

__all__ = ["MatchKind", "SessionMatch", "SessionTable", "TurnOutcome"]

_Judged = tuple[Common, MatchKind, int]  # with the kind of match and the turn

MOST_CANDIDATES = 32
"""Sessions that are compared with one prompt: those found by its longest prefixes, and the one found by its opener."""

EXPIRED_AT_ONCE = 32  # sessions dropped by one turn: two microseconds each
_OUTPUT_DECAY = 0.7  # a session's answers change with its task: the last three or four count
_SPREAD = 0x9E3779B97F4A7C15  # odd, so that successive ids differ in all bits


class SessionTable:
    """All sessions; `now_s` must never decrease. `find` changes nothing but a session's time of last use."""

    def __init__(
        self, *, ttl_s: float, capacity: int, serials: Iterator[int] | None = None, beliefs: Beliefs | None = None
    ) -> None:
        """serials: by which sessions that their clients do not name are numbered; no other process has any of them."""
        if ttl_s <= 0 or capacity < 1:
            raise ConfigError(f"sessions need a ttl_s above 0 and a capacity of at least 1, not {ttl_s} and {capacity}")
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._sessions: OrderedDict[int, Session] = OrderedDict()  # by history, least recently used first
        self._renamed: dict[int, Session] = {}  # by label: its newest history, where that has another number
        self._index: dict[int, Session] = {}  # by prefix key, the newest session that has it
        self._none_expires_before_s = 0.0
        self._serials = serials or count(1)
        self.rendered = RenderedReplies()
        self._beliefs = beliefs or Beliefs(lambda worker: None)
        self.replicated: ReplicatedAtOnce[Session, int | None, set[int], bool] | None = None  # changed: as `adopt`

    def __len__(self) -> int:
        return len(self._sessions)

    # -- the two ends of a turn

    def find(self, prompt: Prompt, now_s: float) -> SessionMatch:
        if self.replicated is not None:
            self.replicated.catch_up()
        if now_s > self._none_expires_before_s or len(self._sessions) > self._capacity:
            self._expire(now_s)
        named = None if prompt.label is None else self._by_name(prompt.label)
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
        if match.doubt is not None:
            cached = outcome.cached_tokens if is_same(match.decode, outcome.decode) else None
            self.rendered.learn(prompt.model, match.doubt, outcome.prompt_tokens, cached)
        session = known = self._sessions.get(match.history)
        kept = NO_UNITS_KEPT if known is None else units_of(known, match.common)
        if session is None or not still_there(session, kept, match, prompt, outcome):
            session, kept = self._add(match, prompt), NO_UNITS_KEPT
        source = None if match.source is None else self._sessions.get(match.source)
        before, has_new_head = index_keys(session, kept), kept.head_mask != prompt.chain.head_mask
        units = self._units(match, source, prompt, outcome)
        session.turn = match.turn
        output_tokens = output_mean(session.output_tokens, outcome.completion_tokens, _OUTPUT_DECAY)
        session.learn(output_tokens, outcome.decode, outcome.prefill, units, outcome.calls_tool)
        kept = session.units
        session.keep_prefixes(self._prefixes(match, source, prompt, outcome, kept))
        new = (after := index_keys(session, kept)) - before
        self._unlink(session, before - after)
        for key in new:
            self._index[key] = session
        if has_new_head:
            session.packed_head = head_points(prompt.chain)
        if session is not known or has_new_head:
            marks = marks_of_prompt(prompt, outcome.prompt_tokens)
            points = points_of_prompt(prompt, outcome.prompt_tokens)
            session.marks = self._beliefs.lasting(marks, points, outcome.decode)
        self._beliefs.ended(session.history, (outcome.decode, outcome.prefill), session.marks)
        self._name(session, prompt.label)
        self._touch(session, now_s)
        if self.replicated is not None:
            self.replicated.changed(session, prompt.label, new, outcome.prefill is not None)
        if len(self._sessions) > self._capacity:
            self._expire(now_s)

    def adopt(self, theirs: Session, label: int | None, keys: Iterable[int], *, has_prefilled: bool = True) -> None:
        """Takes over a session from another process. If both ended a turn of it at once, the later one counts.

        label: the name by which it is found from now on, if it was given one. keys: those that now lead to it.
        has_prefilled: its turn may have had a P.
        """
        try:
            after = index_keys(theirs)
        except ValueError:  # the process is of another version
            return
        ours = self._sessions.get(theirs.history)
        decode, prefill = theirs.decode_residency, theirs.prefill_residency if has_prefilled else None
        if ours is not None:
            if ours.seen_s > theirs.seen_s and ours.turn >= theirs.turn:
                for key in after.intersection(keys, index_keys(ours)):  # the newer turn told only of others
                    if (holder := self._index.get(key)) is None or holder.seen_s < theirs.seen_s:
                        self._index[key] = ours
                return
            for key in index_keys(ours):
                if self._index.get(key) is ours:
                    if key in after:
                        self._index[key] = theirs
                    else:
                        del self._index[key]
            if ours.label is not None and self._renamed.get(ours.label) is ours:
                del self._renamed[ours.label]
                self._name(theirs, ours.label if theirs.label in (None, ours.label) else None)
            if prefill is not None and ours.prefill_residency == prefill:
                prefill = None  # it is told of once more
        self._beliefs.ended(theirs.history, (decode, prefill), theirs.marks)
        self._index.update(dict.fromkeys(after.intersection(keys), theirs))
        self._name(theirs, label)
        self._sessions[theirs.history] = theirs
        self._sessions.move_to_end(theirs.history)
        if theirs.seen_s > self._none_expires_before_s or len(self._sessions) > self._capacity:
            self._expire(theirs.seen_s)

    def holder(self, key: int) -> WorkerId | None:
        """The D of the newest session with this prefix, as a stored response's; None where none is known."""
        session = self._index.get(key)
        return None if session is None else session.decode

    def of_history(self, history: int) -> Session | None:
        return self._sessions.get(history)

    def lookup_keys(self, session: Session) -> tuple[int | None, list[int]]:
        label = session.label if session.label is not None and self._by_name(session.label) is session else None
        keys = index_keys(session)
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
        return [summary_of(session) for session in islice(reversed(self._sessions.values()), limit)]

    # -- finding

    def _match(self, prompt: Prompt, named: Session | None, now_s: float) -> SessionMatch:
        chain = prompt.chain
        sizes = chain.sizes()
        best = self._most_in_common(prompt, named, sizes, now_s)
        if (best is None or not best[0].is_whole or best[0].has_other_head) and (cuts := cuts_of(chain)):
            sizes.update(cuts)
            best = self._most_in_common(prompt, named, sizes, now_s)
        if best is None:
            lost = named is not None or prompt.previous_response_id is not None
            return self._unmatched(MatchKind.LOST if lost else MatchKind.FIRST, prompt, named)
        found, kind, turn = best
        session, doubt, calls_tool = found.session, found.doubt(chain), None
        place = found.up_to(self.rendered.held(prompt.model, doubt, found.place[1]), chain)
        if kind is NEXT:
            calls_tool = session.came_back()
        elif kind is MatchKind.BRANCH:
            left, session = session, Session(self._new_history(prompt), prompt.label)
            # At the first turn any worker that shares the prefix will do, and the policy balances them.
            decode, prefill = (left.decode_residency, left.prefill_residency) if turn > 1 else (None, None)
            session.learn(left.output_tokens, decode, prefill)
        return matched(kind, session, turn, prompt, KnownPart(found.session, place, found, doubt, None, calls_tool))

    def _most_in_common(
        self, prompt: Prompt, named: Session | None, sizes: dict[int, int], now_s: float
    ) -> _Judged | None:
        """The session with the most, and what the request is to it.

        Of equal ones a session that goes on counts before a branch, the named one before others, and then the one that
        was found by the longest prefix. A session that another name has does not keep the client's own from going on.
        """
        judged: list[_Judged] = []
        for session in self._candidates(prompt.chain, named, sizes, now_s):
            found = common(session, prompt.chain, sizes)
            if found is not None and (verdict := judge(found, prompt, named)) is not None:
                kind, turn = verdict
                judged.append((found, kind, turn))
        if len(judged) < 2:  # nearly always
            return judged[0] if judged else None
        best = max(judged, key=lambda one: (one[0].place[0], one[1] is not MatchKind.BRANCH))
        if prompt.label is None or best[0].session.label == prompt.label:
            return best
        own = [one for one in judged if one[1] is not MatchKind.BRANCH and one[0].session.label == prompt.label]
        return max(own, key=lambda one: one[0].place, default=best)

    def _candidates(
        self, chain: Chain, named: Session | None, sizes: dict[int, int], now_s: float
    ) -> Iterable[Session]:
        index, last_reply = self._index, chain.marks.last_reply
        known = index.keys() & sizes.keys()
        found = set(map(index.__getitem__, known))
        if len(found) > 1:
            longest_first = sorted(known, key=sizes.__getitem__, reverse=True)
            if len(known) > MOST_CANDIDATES:
                longest_first = [*longest_first[: MOST_CANDIDATES - 1], longest_first[-1]]
            sessions = [session for key in longest_first if not self._has_expired(session := index[key], now_s)]
        else:  # nearly always
            sessions = [session for session in found if not self._has_expired(session, now_s)]
        if last_reply and (mask := chain.head_mask):  # else it is among them
            after_reply = index.get(chain.keys[last_reply] ^ mask)
            if after_reply is not None and not self._has_expired(after_reply, now_s):
                sessions.insert(0, after_reply)
        if named is not None and sessions[:1] != [named]:
            sessions.insert(0, named)
        return dict.fromkeys(sessions) if len(sessions) > 1 else sessions

    def _unmatched(self, kind: MatchKind, prompt: Prompt, named: Session | None) -> SessionMatch:
        """No prefix is known. Under a known id the turns count on, but nothing is believed to be held."""
        new = Session(self._new_history(prompt), prompt.label)
        if named is not None:
            new.learn(named.output_tokens, None, None)
        affinity = named.decode if named is not None else None
        return matched(kind, new, named.turn + 1 if named else 1, prompt, KnownPart(affinity=affinity))

    def _match_by_count(self, prompt: Prompt, session: Session | None, now_s: float) -> SessionMatch:
        """The paper's rule: the opener is the session, each request with it a turn, and all of its history is held."""
        if session is None:
            return self._unmatched(MatchKind.FIRST, prompt, None)
        self._touch(session, now_s)
        chain = prompt.chain
        found = common(session, chain, chain.sizes())
        if found is not None and found.has_other_head:
            found = None
        # The new turn adds what lies beyond the known prefix; without one, the last message.
        covered = found.place[0] if found is not None else chain.ends[-2] if len(chain.ends) > 1 else 0
        if newest_end(session, is_prompt=True) == chain.end() and found is not None:
            return matched(MatchKind.RETRY, session, session.turn, prompt, KnownPart(session, found.place))
        place = covered, held_tokens(session)
        return matched(MatchKind.NEXT, session, session.turn + 1, prompt, KnownPart(session, place))

    # -- keeping

    def _units(self, match: SessionMatch, source: Session | None, prompt: Prompt, outcome: TurnOutcome) -> bytes:
        """What the session keeps of its newest prompt and the reply."""
        chain, found, doubt = prompt.chain, match.common, match.doubt
        if source is None:
            found = None
        elif found is None or found.session is not source or not found.units.is_of(source.packed):  # it has changed
            cuts = () if chain.long_texts is None else chain.long_texts.known
            found = common(source, chain, {**chain.sizes(), **dict(cuts)})
            doubt = None if found is None else found.doubt(chain)
        before, shared, place = NO_UNITS_KEPT, 0, (0, 0)
        if found is not None:
            before, shared = found.units, 0 if found.has_other_head else found.shared
            place = found.up_to(self.rendered.held(prompt.model, doubt, found.place[1]), chain)
        return pack(before, shared, place, chain, match.turn, outcome)

    def _prefixes(
        self, match: SessionMatch, source: Session | None, prompt: Prompt, outcome: TurnOutcome, kept: KeptUnits
    ) -> list[KnownPrefix]:
        """Ends of its newest prompt and the reply that no unit names."""
        prefixes, chain = list[KnownPrefix](), prompt.chain
        is_again = match.kind is MatchKind.RETRY and is_same(match.decode, outcome.decode)
        if source is not None and (is_again or prompt.previous_response_id is not None):  # one may go on from those too
            prefixes += source.stored(match.turn + is_again)
        if (kept.is_blocks or not kept.count) and chain.size > 0:
            prefixes.append(KnownPrefix.at(chain.end(), match.turn, outcome.prompt_tokens, is_prompt=True))
            if outcome.reply_key is not None:
                prefixes.append(KnownPrefix.at(outcome.reply_key, match.turn, outcome.held_tokens))
        if outcome.response_id is not None and prompt.response_scope is not None:
            stored = PrefixEnd(response_key(chain.hasher, prompt.response_scope, outcome.response_id))
            prefixes.append(KnownPrefix.at(stored, match.turn, outcome.held_tokens, is_stored=True))
        return prefixes

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
            history = (prompt.chain.keys[-1] ^ (next(self._serials) * _SPREAD)) & ((1 << KEY_BITS) - 1)
            if history not in self._sessions:
                return history

    def _name(self, session: Session, label: int | None) -> None:
        if label is not None:
            if session.label is None:
                session.label = label
            if session.history == label:  # nearly always
                self._renamed.pop(label, None)
            else:
                self._renamed[label] = session

    def _by_name(self, label: int) -> Session | None:
        return self._renamed.get(label) or self._sessions.get(label)

    def _touch(self, session: Session | None, now_s: float) -> None:
        if session is not None:
            session.seen_s = now_s
            self._sessions.move_to_end(session.history)

    def _has_expired(self, session: Session, now_s: float) -> bool:
        return now_s - session.seen_s > self._ttl_s

    def _expire(self, now_s: float) -> None:
        """In steps, for the turn that comes after a long pause; it finds no expired session, dropped or not."""
        for _ in range(EXPIRED_AT_ONCE):
            oldest = next(iter(self._sessions.values()), None)
            if oldest is None or (len(self._sessions) <= self._capacity and not self._has_expired(oldest, now_s)):
                self._none_expires_before_s = self._ttl_s + (now_s if oldest is None else oldest.seen_s)
                return
            self._forget(oldest)

    def _forget(self, session: Session) -> None:
        del self._sessions[session.history]
        self._unlink(session, index_keys(session))
        if session.label is not None and self._renamed.get(session.label) is session:
            del self._renamed[session.label]
        self._beliefs.forget(session.history, (session.decode, session.prefill))

    def _unlink(self, session: Session, keys: set[int]) -> None:
        for key in keys:
            if self._index.get(key) is session:
                del self._index[key]
