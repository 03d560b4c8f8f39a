# cython: language_level=3, annotation_typing=False, infer_types=True
"""What each worker is believed to hold of a prompt, from the turns that ran there.

Each worker has a book of its cache. A turn takes room from when it is sent, touches its session's entry when the worker
begins to answer, and again when it ends. The books of all processes of this proxy are told of all their turns, and of
what answers say of caches, in the order in which that comes.

Prompts of several sessions may begin alike. The first few points of each prompt are remembered as marks, with the
session that passed them last; the second session that passes one makes it an entry of its own in its worker's book.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from operator import attrgetter

from ..fleet.view import WorkerView
from ..fleet.worker import Role, WorkerId
from ..runtime.replicated import Replicated
from .cache_book import CacheBook
from .entries import Entries
from .held import (
    MARK_BITS,
    BeliefEvidence,
    BookLessons,
    BookNews,
    CacheFound,
    Found,
    Held,
    LegOutcome,
    Mark,
    PromptEntry,
    Residency,
    SentLeg,
)

SHARED_BYTES = 1024  # about 256 tokens: shorter beginnings are not worth a worker
MARKS = 3  # of one prompt, beside points inside of its head
MARKS_KEPT = 16_384  # of all prompts; 150 bytes each
MARKS_OF_SESSION = 4  # as many are kept for each session that is: a mark leads to the one that passed it last
CLEARED_AT_ONCE = 32  # entries of books that are closed: a microsecond each
ELSEWHERE = 0.9  # of what a worker holds; another one that holds so much can take its place
OWN = -1  # in place of another process's index

_MASK = (1 << MARK_BITS) - 1
_TOKENS = attrgetter("tokens")
_OWN_TURNS, _SHARED_PREFIX = BeliefEvidence.OWN_TURNS, BeliefEvidence.SHARED_PREFIX  # an enum's members take long


class Beliefs:
    """The books of all workers; `view` says what a worker is now."""

    def __init__(self, view: Callable[[WorkerId], WorkerView | None], sessions: int = MARKS_KEPT) -> None:
        """sessions: so many are remembered."""
        self._view = view
        self._marks_kept = min(MARKS_KEPT, MARKS_OF_SESSION * sessions)
        self._books: dict[WorkerId, CacheBook] = {}
        self._entries = Entries()  # of all books
        self._numbered: dict[int, tuple[WorkerId, CacheBook]] = {}  # the books, in the same order
        self._numbers = count(1)
        self._closed: list[CacheBook] = []  # of engines that are gone; their numbers lead to no worker
        self._marks: dict[int, int] = {}  # by key: the history that passed it last, and its tokens; the oldest first
        self._legs: dict[int, dict[int, SentLeg]] = {OWN: {}}  # by process and number: turns that have used nothing yet
        self._passed: dict[tuple[int, int], tuple[int, int]] = {}  # by the same: a book's number, see `pass_on`
        self.leg_numbers: Iterator[int] = count(1)
        self.replicated: Replicated[BookNews] | None = None

    # -- what is held

    def held(
        self,
        views: Mapping[WorkerId, WorkerView],
        entry: PromptEntry,
        most: int,
        observed: Mapping[WorkerId, int] | None = None,
        by_tokens: Mapping[WorkerId, Found] | None = None,
    ) -> dict[WorkerId, Held]:
        """Of a prompt, by those of these workers that hold any of it. One that keeps no prefixes never does.

        most: tokens that it has in common with the history that it continues; observed: what engines themselves say
        that they hold of that, which then counts alone; by_tokens: what they say of this very prompt, which counts
        above all.
        """
        source = entry.source
        found: dict[WorkerId, Held] = {}  # `dict[WorkerId, Held]()` takes ten times as long
        own = _OWN_TURNS if source == entry.history else _SHARED_PREFIX
        by_mark = self._longest(entry) if entry.marks or entry.points else None
        places = dict.fromkeys(by_mark, 0) if by_mark else {}  # slot 0 holds nothing
        entries = self._entries
        slot = 0 if source is None else entries.first(source)
        while slot:
            places[entries.number(slot)] = slot
            slot = entries.also(slot)
        for number in sorted(places) if len(places) > 1 else places:
            if (numbered := self._numbered.get(number)) is None:
                continue
            worker, book = numbered
            view = views.get(worker)
            if view is None or view.incarnation != book.incarnation or (observed and worker in observed):
                continue
            engine = view.worker
            if engine.coordinates and not engine.keeps_prefixes:
                continue
            held = entries.held(places[number])
            tokens = held if held < most else most
            if by_mark and (tokens < most or not tokens) and (shared := by_mark.get(number, 0)) > tokens:
                found[worker] = Held(shared, _SHARED_PREFIX)
            elif tokens:
                found[worker] = Held(tokens, own)
        for worker, tokens in observed.items() if observed else ():
            if tokens > 0 and worker in views and views[worker].worker.keeps_prefixes:
                found[worker] = Held(tokens, BeliefEvidence.KV_EVENTS)
        if by_tokens:
            _overrule(found, by_tokens)
        return found

    def why_lost(self, was: Residency | None) -> str | None:
        """Why the worker no longer holds what it did: `decode_restarted` or `evicted`; None: nothing was there."""
        if was is None:
            return None
        view = self._view(was.worker)
        if view is None or (view.worker.coordinates and not view.worker.keeps_prefixes):
            return None
        return "evicted" if view.incarnation == was.incarnation else "decode_restarted"

    # -- what turns tell

    def residency(self, worker: WorkerId, tokens: int) -> Residency | None:
        """That this worker, as it is now, holds so many tokens; None for a worker that is gone."""
        view = self._view(worker)
        return None if view is None else Residency(worker, view.incarnation, tokens)

    def passed(self, history: int, marks: Iterable[Mark]) -> None:
        """A worker holds a prompt of this history, which has these marks."""
        known, history = self._marks, history << MARK_BITS
        for mark in marks:
            key, tokens = mark.key, mark.tokens
            known.pop(key, None)
            known[key] = history | (tokens if tokens < _MASK else _MASK)
        if len(known) > self._marks_kept:  # many at once, as to find the oldest entry of a dict takes time
            for key in list(islice(known, 1 + self._marks_kept // 8)):
                del known[key]

    def ended(self, history: int, holders: Iterable[Residency | None], marks: Sequence[Mark]) -> None:
        """A turn has ended, here or in another process, on these workers. marks: its prompt's, shortest first."""
        for where in holders:
            # Of an engine that has restarted since, or is gone, nothing stays.
            if where is not None and (book := self._book(where.worker, where.incarnation)) is not None:
                book.touch(history, where.tokens, marks)
        if marks:
            self.passed(history, marks)

    def lasting(self, marks: list[Mark], points: Sequence[Mark], decode: Residency | None) -> list[Mark]:
        """Which of these a session keeps: all marks, and a point that has an entry where the session is."""
        book = None if decode is None or not points else self._books.get(decode.worker)
        known = [] if book is None else [one for one in (*points, *marks) if book.held(one.key)]
        return sorted({*marks, max(known, key=_TOKENS)}, key=_TOKENS) if known else marks

    def sent(self, leg: SentLeg, by: int = OWN) -> int:
        """See `CacheBook.expect`. Returns, for `found`, what was used there since this history was.

        by: the process whose turn it is. One that tells of a leg twice changes nothing by it.
        """
        legs = self._legs.get(by)
        if legs is None:
            legs = self._legs[by] = {}
        number, history, source = leg.number, leg.history, leg.source
        if number in legs:
            return 0
        book = self._book(leg.worker)
        legs[number] = leg
        if self.replicated is not None and by == OWN:
            self.replicated.changed(leg)
        if book is None:
            return 0
        slot = book.slot(history)
        since = book.used_since(slot) if slot and by == OWN else 0
        if source is not None and (passed := book.pass_on(source, leg.shared)):
            self._passed[by, number] = book.number, passed
        book.expect(history, slot, leg.tokens, leg.marks)
        return since

    def ended_leg(self, end: LegOutcome, by: int = OWN) -> None:
        """The worker uses the leg's prefix now, or will not."""
        legs = self._legs.get(by)
        leg = legs.pop(end.number, None) if legs else None
        if leg is None:
            return
        if self.replicated is not None and by == OWN:
            self.replicated.changed(end)
        number = passed = 0
        history, source = leg.history, leg.source
        if source is not None:
            number, passed = self._passed.pop((by, end.number), (0, 0))
        book = self._book(leg.worker)
        if book is None:
            return
        if end.has_used:
            book.begin(history, leg.tokens, _with_point(book, leg) if leg.points else leg.marks)
            if leg.opens:
                self.passed(history, (*leg.points, *leg.marks))
            return
        book.withdraw(history)
        if source is not None and number == book.number:
            book.take_back(source, passed)

    def found(self, found: CacheFound, by: int = OWN) -> None:
        """See `CacheBook.found`."""
        if self.replicated is not None and by == OWN:
            self.replicated.changed(found)
        where = found.where
        book = self._book(where.worker, where.incarnation)
        if book is not None:
            book.found(found.history, found.since, where.tokens, found.cached)

    def forget(self, history: int, workers: Iterable[WorkerId | None]) -> None:
        for worker in workers:
            book = None if worker is None else self._books.get(worker)
            if book is not None:
                book.forget(history)

    def book(self, worker: WorkerId) -> CacheBook | None:
        return self._books.get(worker)

    def is_held_elsewhere(self, key: int, book: CacheBook, *, prefills_answer: bool) -> bool:
        """Whether other workers, as they are now, hold as much of this history, or nearly.

        A P is none for a D, unless P answer too: a turn that comes back would wait until its KV has been moved.
        """
        holders: dict[int, int] = {}
        self._note_holders(holders, key, _MASK)
        own = book.number
        enough = ELSEWHERE * holders.pop(own, 0)
        if not holders:  # nearly always
            return False
        by_any = prefills_answer or self._role(own) is Role.PREFILL
        roles = [self._role(number) for number, there in holders.items() if there >= enough]
        return any(role is not None and (by_any or role is not Role.PREFILL) for role in roles)

    def _role(self, number: int) -> Role | None:
        """Of the worker with this book; None: it is gone, or another engine is there."""
        worker, book = self._numbered[number]
        view = self._view(worker)
        return None if view is None or view.incarnation != book.incarnation else view.role

    def capacities(self) -> dict[WorkerId, int]:
        """In tokens, as far as they are believed; 0: unknown."""
        return {worker: book.capacity for worker, book in self._books.items()}

    # -- other processes

    def legs(self) -> list[SentLeg]:
        """This process's own, as `adopt_legs` takes them."""
        return list(self._legs[OWN].values())

    def adopt_legs(self, legs: Iterable[SentLeg], by: int) -> None:
        """All that the process has under way; others of its legs have ended unheard."""
        kept = {leg.number: leg for leg in legs}
        for number in self._legs.get(by, {}).keys() - kept.keys():
            self.ended_leg(LegOutcome(number, has_used=False), by)
        for leg in kept.values():
            self.sent(leg, by)

    def lessons(self) -> list[BookLessons]:
        """What `adopt_lessons` takes."""
        return [BookLessons(worker, book.incarnation, *book.lessons) for worker, book in self._books.items()]

    def adopt_lessons(self, lessons: BookLessons) -> None:
        """What another process has learned from answers; what this one has is in it."""
        book = self._book(lessons.worker, lessons.incarnation)
        if book is not None:
            book.adopt(lessons.believed, lessons.counts, lessons.missed)

    # -- inside

    def _note_holders(self, holders: dict[int, int], key: int, most: int) -> None:
        """By their numbers, further books that have an entry of this key, and how many tokens they hold of it."""
        entries = self._entries
        slot = entries.first(key)
        while slot:
            number = entries.number(slot)
            if number not in holders and number in self._numbered:
                held = entries.held(slot)
                if held or entries.own(slot):  # else it is of nothing
                    holders[number] = held if held < most else most
            slot = entries.also(slot)

    def _longest(self, entry: PromptEntry) -> dict[int, int]:
        """What each book holds of the longest of the prompt's marks that it knows, by an entry of the mark or by that
        of a history with it."""
        longest: dict[int, int] = {}
        points, before = entry.points, None
        for mark in reversed(sorted((*points, *entry.marks), key=_TOKENS) if points else entry.marks):
            known = self._marks.get(mark.key)
            if known is not None:
                self._note_holders(longest, mark.key, _MASK)
                history = known >> MARK_BITS
                if history != before:  # else its books are noted
                    self._note_holders(longest, history, known & _MASK)
                    before = history
        return longest

    def _book(self, worker: WorkerId, incarnation: str | None = None) -> CacheBook | None:
        """The worker's, up to date; None if it is gone, or another engine than this one is there."""
        if self._closed:
            self._clear()
        view = self._view(worker)
        if view is None:
            return None
        book, current = self._books.get(worker), view.incarnation
        if incarnation is not None and current != incarnation:
            return None
        if book is None or book.incarnation != current:
            return self._open(worker, view)
        book.report(view.load.kv_capacity_tokens)
        return book

    def _open(self, worker: WorkerId, view: WorkerView) -> CacheBook:
        """The book of an engine that is new."""
        for known in [known for known in self._books if known == worker or self._view(known) is None]:
            self._close(known)
        book = self._books[worker] = CacheBook(view.incarnation, self._entries, next(self._numbers), self._marks)
        self._numbered[book.number] = worker, book
        book.report(view.load.kv_capacity_tokens)
        for leg in [leg for legs in self._legs.values() for leg in legs.values() if leg.worker == worker]:
            book.expect(leg.history, book.slot(leg.history), leg.tokens, leg.marks)
        return book

    def _close(self, worker: WorkerId) -> None:
        book = self._books.pop(worker)
        del self._numbered[book.number]
        self._closed.append(book)

    def _clear(self) -> None:
        """In steps: to take a whole book's entries out takes 30 ms."""
        if self._closed[-1].clear(CLEARED_AT_ONCE):
            self._closed.pop()


def _overrule(held: dict[WorkerId, Held], by_tokens: Mapping[WorkerId, Found]) -> None:
    for worker, found in by_tokens.items():
        known = held.get(worker)
        if not found.tokens:
            if found.is_exact:
                held.pop(worker, None)
        elif found.is_exact or known is None or found.tokens > known.tokens:
            is_shared = known is None or known.evidence is _SHARED_PREFIX
            held[worker] = Held(found.tokens, BeliefEvidence.KV_EVENTS, is_shared)


def _with_point(book: CacheBook, leg: SentLeg) -> list[Mark]:
    """The shared marks of a leg, and a shared point beyond the last of them.

    Entries lie inside of one another, and later turns touch marks: no other point has an entry.
    """
    shared = [mark for mark in leg.marks if book.is_shared(leg.history, mark)]
    within = shared[-1].tokens if shared else 0
    beyond = [point for point in leg.points if point.tokens > within and book.is_shared(leg.history, point)]
    return shared + beyond[-1:]


def marks_of(keys: Sequence[int], ends: Sequence[int], size: int, prompt_tokens: int) -> list[Mark]:
    """The first points of a prompt that other prompts may share, shortest first.

    ends: in bytes, as `size`, which is all of the prompt and has `prompt_tokens`.
    """
    first = bisect_left(ends, SHARED_BYTES)  # not tokens: each process would estimate others
    if first == len(ends):
        return []
    return [Mark(keys[at], prompt_tokens * ends[at] // size) for at in range(first, min(first + MARKS, len(ends)))]
