"""What becomes of the two legs of a SPLIT: which is asked when, and what follows from what becomes of each.

`BEGINNINGS` and `MOVES` are all the rules, for every order of the legs. Who runs legs tells `Legs` what has happened,
and does what they answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum, auto
from types import MappingProxyType


class LegOrder(Enum):
    """In which order the legs of a SPLIT run."""

    P_THEN_D = auto()  # the decode leg is made of what P has answered
    TOGETHER = auto()  # both at once: D waits for P, and takes what it writes
    D_FIRST = auto()  # both at once, D's a moment earlier: P waits for D too, and begins once D has come

    @property
    def is_joint(self) -> bool:
        return self is not LegOrder.P_THEN_D


class LegsState(StrEnum):
    # P, then D
    PREFILL = auto()  # P computes the prompt, and D is asked once P has answered
    PULL = auto()  # P has announced its KV, and D is asked, which takes it as it begins
    # both at once
    BOTH = auto()  # both are under way
    DECODE = auto()  # P has done its part, and D's first event is awaited
    BESIDE = auto()  # D answers, and P is still at work
    # in either order
    ALONE = auto()  # P has ended and hands nothing over: D computes the prompt itself
    ANSWERED = auto()  # the answer has begun, and P has ended
    # nobody waits for the answer any more
    LEFT_PREFILL = auto()  # P may be about to announce its KV
    LEFT_PULL = auto()  # D may be about to take it
    LEFT_BOTH = auto()  # both go on, so that D gets what it has set blocks aside for
    # no leg is under way
    OVER = auto()
    TAKEN = auto()  # nobody waited for the answer, and D has what P computed
    UNTAKEN = auto()  # P keeps what it announced, as no D was sent its leg


class LegsEvent(StrEnum):
    HANDED_OVER = auto()  # P's whole answer is here, and D gets the prompt's KV
    NOTHING = auto()  # or D gets nothing
    WHOLE = auto()  # or it is all of the turn's answer, as P's first token was the last one
    PREFILL_FAILED = auto()
    BEGAN = auto()  # D's first event is here
    DECODE_FAILED = auto()
    UNREACHED = auto()  # D's leg has failed, or is given up, before it was sent
    LEFT = auto()  # the client has left, and P's KV is to be taken, or written, all the same
    CLOSED = auto()  # nothing is waited for any more: the client has left, or the answer is at its end


class LegsAction(StrEnum):
    ASK_PREFILL = auto()
    ASK_DECODE = auto()  # of P, then D: with what P has announced
    COMPUTE = auto()  # D is asked for all of it, the prompt too
    ANSWER = auto()  # P's answer is the client's
    END_PREFILL = auto()  # at once: its connection is closed
    END_DECODE = auto()
    FAIL = auto()  # this leg's failure is the attempt's
    # What P's leg came to is noted, beside an answer that goes on whatever it is.
    NOTE_MOVED = auto()  # D has what it computed
    NOTE_UNMOVED = auto()  # it ended well, and D did without
    NOTE_FAILED = auto()
    NOTE_ENDED = auto()  # it was ended, as the answer was at its end


_Move = tuple[LegsState, tuple[LegsAction, ...]]


def _beginnings() -> Mapping[LegOrder, _Move]:
    s, a = LegsState, LegsAction
    return MappingProxyType(
        {
            LegOrder.P_THEN_D: (s.PREFILL, (a.ASK_PREFILL,)),
            LegOrder.TOGETHER: (s.BOTH, (a.ASK_PREFILL, a.ASK_DECODE)),
            LegOrder.D_FIRST: (s.BOTH, (a.ASK_DECODE, a.ASK_PREFILL)),
        }
    )


_Moves = dict[LegsState, dict[LegsEvent, _Move]]


def _p_then_d() -> _Moves:
    s, e, a = LegsState, LegsEvent, LegsAction
    return {
        s.PREFILL: {
            e.HANDED_OVER: (s.PULL, (a.ASK_DECODE,)),
            e.NOTHING: (s.ALONE, (a.COMPUTE,)),
            e.WHOLE: (s.ANSWERED, (a.ANSWER,)),
            e.PREFILL_FAILED: (s.OVER, (a.FAIL,)),
            e.LEFT: (s.LEFT_PREFILL, ()),
        },
        s.PULL: {
            e.BEGAN: (s.ANSWERED, (a.NOTE_MOVED,)),
            e.DECODE_FAILED: (s.OVER, (a.FAIL,)),
            e.UNREACHED: (s.UNTAKEN, (a.FAIL,)),
            e.LEFT: (s.LEFT_PULL, ()),
        },
    }


def _both_at_once() -> _Moves:
    s, e, a = LegsState, LegsEvent, LegsAction
    return {
        s.BOTH: {
            e.HANDED_OVER: (s.DECODE, ()),
            e.NOTHING: (s.ALONE, (a.END_DECODE, a.COMPUTE)),
            e.WHOLE: (s.ANSWERED, (a.END_DECODE, a.ANSWER)),
            e.PREFILL_FAILED: (s.OVER, (a.END_DECODE, a.FAIL)),
            e.BEGAN: (s.BESIDE, ()),
            e.DECODE_FAILED: (s.OVER, (a.END_PREFILL, a.FAIL)),
            e.LEFT: (s.LEFT_BOTH, ()),
            e.CLOSED: (s.OVER, (a.END_PREFILL, a.END_DECODE)),
        },
        s.DECODE: {
            e.BEGAN: (s.ANSWERED, (a.NOTE_MOVED,)),
            e.DECODE_FAILED: (s.OVER, (a.FAIL,)),
            e.LEFT: (s.LEFT_PULL, ()),
            e.CLOSED: (s.OVER, (a.END_DECODE,)),
        },
        s.BESIDE: {
            e.HANDED_OVER: (s.ANSWERED, (a.NOTE_MOVED,)),
            e.NOTHING: (s.ANSWERED, (a.NOTE_UNMOVED,)),
            e.WHOLE: (s.ANSWERED, (a.NOTE_UNMOVED,)),
            e.PREFILL_FAILED: (s.ANSWERED, (a.NOTE_FAILED,)),
            e.LEFT: (s.TAKEN, (a.END_PREFILL, a.NOTE_ENDED)),
            e.CLOSED: (s.OVER, (a.END_PREFILL, a.NOTE_ENDED)),
        },
    }


def _in_either_order() -> _Moves:
    s, e, a = LegsState, LegsEvent, LegsAction
    return {
        s.ALONE: {
            e.BEGAN: (s.ANSWERED, (a.NOTE_UNMOVED,)),
            e.DECODE_FAILED: (s.OVER, (a.FAIL,)),
            e.LEFT: (s.OVER, (a.END_DECODE,)),
            e.CLOSED: (s.OVER, (a.END_DECODE,)),
        },
        s.ANSWERED: {e.LEFT: (s.TAKEN, ()), e.CLOSED: (s.OVER, ())},
        **{over: {e.LEFT: (over, ()), e.CLOSED: (over, ())} for over in (s.OVER, s.TAKEN, s.UNTAKEN)},
    }


def _left() -> _Moves:
    s, e, a = LegsState, LegsEvent, LegsAction
    return {
        s.LEFT_PREFILL: {
            e.HANDED_OVER: (s.UNTAKEN, ()),
            e.NOTHING: (s.OVER, ()),
            e.WHOLE: (s.OVER, ()),
            e.PREFILL_FAILED: (s.OVER, ()),
            e.CLOSED: (s.OVER, (a.END_PREFILL,)),
        },
        s.LEFT_PULL: {
            e.BEGAN: (s.TAKEN, ()),
            e.DECODE_FAILED: (s.OVER, ()),
            e.UNREACHED: (s.UNTAKEN, (a.END_DECODE,)),
            e.CLOSED: (s.TAKEN, (a.END_DECODE,)),
        },
        s.LEFT_BOTH: {
            e.HANDED_OVER: (s.LEFT_PULL, ()),
            e.NOTHING: (s.OVER, (a.END_DECODE,)),
            e.WHOLE: (s.OVER, (a.END_DECODE,)),
            e.PREFILL_FAILED: (s.OVER, (a.END_DECODE,)),
            e.BEGAN: (s.TAKEN, (a.END_PREFILL,)),
            e.DECODE_FAILED: (s.OVER, (a.END_PREFILL,)),
            e.CLOSED: (s.OVER, (a.END_PREFILL, a.END_DECODE)),
        },
    }


BEGINNINGS = _beginnings()
MOVES: Mapping[LegsState, Mapping[LegsEvent, _Move]] = MappingProxyType(
    _p_then_d() | _both_at_once() | _in_either_order() | _left()
)
"""The next state and what is to be done, in this order. Any other event in a state is an error of who runs the legs."""


class Legs:
    """Where the two legs of one attempt are."""

    __slots__ = ("asked_first", "state")

    def __init__(self, order: LegOrder) -> None:
        self.state, self.asked_first = BEGINNINGS[order]

    def take(self, event: LegsEvent) -> tuple[LegsAction, ...]:
        """What is to be done about it. KeyError where it cannot happen."""
        self.state, actions = MOVES[self.state][event]
        return actions
