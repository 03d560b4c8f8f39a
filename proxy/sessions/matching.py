"""Judges what one session has in common with a request: which turn of which session the request is.

A request shares its prefix with the session that has the longest one in common with it:

1. The session's newest prompt is all of the request: RETRY, the same turn again. If it gets another reply, a new
   session begins there: two users with one opener are two sessions from their second turn on.
2. The request continues the newest prompt, with its reply or another: NEXT, the session grows by a turn.
3. Something of the newest turn is replaced, and the conversation has gone on by a reply and a message: NEXT too.
   Clients do so that put a reminder or what they have retrieved into the newest message only. Nobody else has sent
   what was replaced, as a turn of his own would have been seen.
4. Whatever else shares more than the head: BRANCH, a new session from there on. The newest message was edited and
   nothing follows yet; an older turn was; the history was compacted or cut; or it is known by another name.

A branch at the first turn must share `LEAST_SHARED` tokens: less is not worth a worker.

What the template leaves out of the newest reply, or of the round before, counts as not shared: see `rendered_replies`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from enum import StrEnum

import msgspec

from ..beliefs.held import Residency
from ..fleet.worker import WorkerId
from .kept_units import KeptUnits, Place, TurnOutcome
from .prefix_chain import Chain, PrefixEnd
from .prompt_head import common_head
from .rendered_replies import Doubt
from .session import KnownPrefix, Prompt, Session, hexadecimal
from .text_kinds import Amounts, added

LEAST_SHARED = 256


class MatchKind(StrEnum):
    FIRST = "first"
    NEXT = "next"
    RETRY = "retry"
    BRANCH = "branch"
    LOST = "lost"


NEXT = MatchKind.NEXT  # named, as Python 3.11 takes 0.2 us to find a member of an enum


class SessionMatch(msgspec.Struct, frozen=True, gc=False):
    """What `find` tells of a request: its session and turn, and what is known to be held of its prompt.

    No `gc`: it is in no reference cycle.
    """

    session_id: str  # hexadecimal
    turn: int  # 1-based
    kind: MatchKind
    held_tokens: int  # of the known prefix, the most that a worker holds of this prompt; 0 without one
    new_bytes: int  # of the prompt, beyond what those tokens count
    added: Amounts  # the same by kinds of text
    history: int  # histories under one id share `session_id`
    decode: Residency | None = None  # after the session's last turn
    output_tokens: float | None = None  # mean length of this session's answers
    source: int | None = None  # the history that the prefix is of: this one, or what a branch leaves; None without one
    parent: int | None = None  # key of that history's newest prompt, as it was found
    affinity: WorkerId | None = None  # where to compute what nobody holds: the D of the session that the client names
    doubt: Doubt | None = None  # where what is held depends on the template
    common: Common | None = None  # with the source, as it was found
    ended_s: float | None = None  # its last answer, where this is the first request after it that goes on
    calls_tool: bool = False  # that answer


class Common(msgspec.Struct, frozen=True, gc=False):
    """What a session has in common with a prompt."""

    session: Session
    units: KeptUnits
    shared: int  # units
    place: Place  # the last common one; its bytes are those of the prompt
    is_whole: bool  # the session's newest prompt is in it; after another head, if it had one
    turn: int  # that a prompt has which differs from there on
    has_other_head: bool = False  # tools or system differ, so no more than a part of them is held
    most_tokens: int = 0  # of that part, whichever of the two is first

    @property
    def own_units(self) -> KeptUnits:
        """The session's, after the head that it had."""
        return self.session.units if self.has_other_head else self.units

    def doubt(self, chain: Chain) -> Doubt | None:
        """What the template may have left out of the newest reply, or of the round before the prompt's own."""
        if self.has_other_head:
            return None
        units, (size, tokens) = self.units, self.place
        has_reply = units.in_prompt < self.shared
        before_reply = units.tokens(units.in_prompt - 1) if has_reply else tokens
        if units.reply_reasoned and not chain.marks.reasons:
            tokens = before_reply  # the client has left it out
        round_is_over = chain.ends[chain.marks.last_user] > size
        if round_is_over and units.reasoned and 0 < units.round_tokens < tokens:
            return Doubt(units.round_tokens, tokens, is_reasoned=True, round_is_over=True)
        if not has_reply:
            return None
        return Doubt(before_reply, tokens, is_reasoned=units.reply_reasoned, round_is_over=round_is_over)

    def up_to(self, tokens: int, chain: Chain) -> Place:
        """The last common unit within so many tokens, or `place` if that is."""
        if tokens >= self.place[1]:
            return self.place
        return self.units.place(self.units.within(tokens, self.shared), chain.sizes()) or (0, 0)


def common(session: Session, chain: Chain, sizes: dict[int, int]) -> Common | None:
    """None if there is nothing. sizes: bytes of the prompt at each of its keys, and of its cuts."""
    units, head_mask = session.units, chain.head_mask
    has_other_head = units.head_mask != head_mask and units.count > 0
    if has_other_head:
        units = units.under(head_mask)
    shared = units.shared(sizes)
    is_whole = 0 < units.in_prompt <= shared and not units.is_blocks
    place = units.place(shared, sizes)
    turn = units.turn(shared) if shared < units.count else session.turn + (not units.is_blocks)
    if not is_whole:
        place = units.last_cut(sizes, place[0] if place else 0) or place
        if shared and sizes[units.key(shared - 1)] == chain.size:  # an earlier prompt, from its start to its end
            turn = units.turn(shared - 1)
    most_tokens = 0
    if has_other_head and place is not None:
        place, most_tokens = _place_in_head(session, chain)
    for prefix in session.prefixes() if session.packed_prefixes else ():
        size = _reach(prefix, chain, sizes)
        if size is not None and (place is None or size >= place[0]):
            place, turn = (size, prefix.tokens), prefix.turn + 1
            is_whole = prefix.turn == session.turn
            if prefix.is_stored and has_other_head:  # it stands for the head too, whatever that was
                units, shared, has_other_head, most_tokens = session.units, 0, False, 0
    return None if place is None else Common(session, units, shared, place, is_whole, turn, has_other_head, most_tokens)


def units_of(session: Session, found: Common | None) -> KeptUnits:
    """Those that `found` has read, if they are still the session's."""
    if found is not None and found.session is session and found.units.is_of(session.packed):
        return found.units
    return session.units


def newest_key(session: Session, units: KeptUnits) -> int | None:
    """Up to where its newest prompt goes, as `newest_end` says."""
    key = units.newest_key
    if key is not None:
        return key
    newest = newest_end(session, is_prompt=True)
    return None if newest is None else newest.key


def newest_end(session: Session, *, is_prompt: bool) -> PrefixEnd | None:
    """Where its newest prompt ends, or the reply to it."""
    units = session.units
    key = units.newest_key
    if key is not None:
        return PrefixEnd(key) if is_prompt else units.reply
    for prefix in session.prefixes():
        if prefix.turn == session.turn and prefix.is_prompt is is_prompt and not prefix.is_stored:
            return prefix.end
    return None


def judge(found: Common, prompt: Prompt, named: Session | None) -> tuple[MatchKind, int] | None:
    """Which turn of the session, or of a branch of it, the request is; None if what it shares is not worth it."""
    session, chain = found.session, prompt.chain
    may_grow = _may_grow(session, prompt, named)
    turn = found.turn
    if found.is_whole and _is_newest(found, chain):
        if may_grow:
            return MatchKind.RETRY, session.turn
        turn = session.turn
    elif may_grow and (found.is_whole or _has_gone_on(found, chain)):
        if found.has_other_head and named is not session and found.most_tokens < LEAST_SHARED:
            return None
        return NEXT, session.turn + 1
    return None if turn == 1 and found.place[1] < LEAST_SHARED else (MatchKind.BRANCH, turn)


def _is_newest(found: Common, chain: Chain) -> bool:
    """Whether the prompt is the session's newest one again."""
    key = found.own_units.newest_key
    if key is not None:
        return key == chain.keys[-1] and not chain.tail
    return newest_end(found.session, is_prompt=True) == chain.end()


def _may_grow(session: Session, prompt: Prompt, named: Session | None) -> bool:
    """Labels must agree: a session without one takes the first it is given, unless another session has that already."""
    label = prompt.label
    return label is None or label == session.label or (session.label is None and named is None)


def _has_gone_on(found: Common, chain: Chain) -> bool:
    """Whether part of the newest turn was replaced, and at least a reply and a message have followed."""
    if found.turn != found.session.turn or found.units.is_blocks:
        return False
    replaced = found.units.in_prompt - found.shared
    return len(chain.keys) - bisect_right(chain.ends, found.place[0]) >= replaced + 2


def _place_in_head(session: Session, chain: Chain) -> tuple[Place, int]:
    """The last place of the session's head that the prompt surely has too, and the most tokens that may be common.

    That is not the same until the order of the model's template is known.
    """
    points = session.head_points
    if not points:
        return (0, 0), 0
    found, tools_first = common_head(chain, points), chain.marks.tools_first
    least, most = min(found), max(found)
    if tools_first is not None:
        least = most = found.tools_first if tools_first else found.system_first
    head_tokens, head_size = session.units.head_tokens, points[-1][1]
    return (least, head_tokens * least // head_size), head_tokens * most // head_size


def _reach(prefix: KnownPrefix, chain: Chain, sizes: dict[int, int]) -> int | None:
    start = sizes.get(prefix.key)
    if start is None or not prefix.tail:
        return start
    return chain.reach(bisect_left(chain.ends, start), prefix.tail, prefix.check)


def still_there(session: Session, units: KeptUnits, match: SessionMatch, prompt: Prompt, outcome: TurnOutcome) -> bool:
    """Whether the session, with these units, is still as `find` saw it: another turn of it may have ended since."""
    if prompt.opener is not None:
        return match.turn >= session.turn
    if prompt.label is not None and session.label not in (None, prompt.label):
        return False  # it was given another name meanwhile
    if match.kind is NEXT:
        if session.turn != match.turn - 1 or match.parent is None:
            return False
        return newest_key(session, units) == match.parent
    if match.kind is not MatchKind.RETRY or session.turn != match.turn:
        return False
    if newest_end(session, is_prompt=True) != prompt.chain.end():
        return False
    return outcome.reply_key is None or newest_end(session, is_prompt=False) in (None, outcome.reply_key)


def is_same(before: Residency | None, now: Residency | None) -> bool:
    """Whether the worker that ended the session's last turn has ended this one: it has held the reply."""
    return before is not None and now is not None and before.worker == now.worker


class KnownPart(msgspec.Struct, frozen=True, gc=False):
    """Of a prompt."""

    session: Session | None = None  # that the known prefix is of
    place: Place = (0, 0)  # up to which it is known
    common: Common | None = None
    doubt: Doubt | None = None
    affinity: WorkerId | None = None
    calls_tool: bool | None = None  # its session's last answer, where this is the first request after it that goes on


def matched(
    kind: MatchKind,
    session: Session,
    turn: int,
    prompt: Prompt,
    known: KnownPart,
) -> SessionMatch:
    source, found, calls_tool = known.session, known.common, known.calls_tool
    held_bytes, held_tokens = known.place
    parent = covered = None
    if source is not None:
        parent, covered = newest_key(source, source.units if found is None else found.own_units), held_bytes
    return SessionMatch(  # by position: msgspec takes 2 us to find 16 names
        session.id if prompt.label is None else hexadecimal(prompt.label),
        turn,
        kind,
        held_tokens,
        prompt.chain.size - held_bytes,
        added(prompt.chain, covered),
        session.history,
        session.decode_residency,
        session.output_tokens,
        None if source is None else source.history,
        parent,
        known.affinity,
        known.doubt,
        found,
        None if calls_tool is None else session.seen_s,
        calls_tool or False,
    )
