"""What each worker is believed to hold of a prompt, from the turns that ran there.

Each worker has a book of its cache. A turn touches its session's entry when the worker begins to answer, and again
when it ends; the turns that end in other processes of this proxy reach the books in the order in which they come.

Prompts of several sessions may begin alike. The first few points of each prompt are remembered as marks, with the
session that passed them last; the second session that passes one makes it an entry of its own in its worker's book.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from ..fleet.view import WorkerView
from ..fleet.worker import WorkerId
from .cache_book import CacheBook
from .held import BeliefEvidence, Held, Mark, PromptEntry, Residency

SHARED_TOKENS = 256  # shorter beginnings are not worth a worker
MARKS = 3  # of one prompt
MARKS_KEPT = 16_384  # of all prompts; 150 bytes each

_BITS = 30  # for the tokens of a mark
_MASK = (1 << _BITS) - 1


class Beliefs:
    """The books of all workers; `view` says what a worker is now."""

    def __init__(self, view: Callable[[WorkerId], WorkerView | None]) -> None:
        self._view = view
        self._books: dict[WorkerId, CacheBook] = {}
        self._marks: dict[int, int] = {}  # by key: the history that passed it last, and its tokens; the oldest first

    # -- what is held

    def held(
        self,
        views: Mapping[WorkerId, WorkerView],
        entry: PromptEntry,
        most: int,
        observed: Mapping[WorkerId, int] | None = None,
    ) -> dict[WorkerId, Held]:
        """Of a prompt, by those of these workers that hold any of it.

        most: tokens that it has in common with the history that it continues; observed: what engines themselves say
        that they hold, which then counts alone.
        """
        source, shares = entry.source, BeliefEvidence.SHARED_PREFIX
        own = BeliefEvidence.OWN_TURNS if source == entry.history else shares
        passed = [(mark.key, self._marks[mark.key]) for mark in reversed(entry.marks) if mark.key in self._marks]
        found = {}
        for worker, book in self._books.items():
            view = views.get(worker)
            if view is None or view.incarnation != book.incarnation or (observed and worker in observed):
                continue
            tokens = 0 if source is None else min(book.held(source), most)
            shared = 0 if tokens and tokens == most else _shared(book, passed)
            if shared > tokens:
                found[worker] = Held(shared, shares)
            elif tokens:
                found[worker] = Held(tokens, own)
        for worker, tokens in (observed or {}).items():
            if tokens > 0 and worker in views:
                found[worker] = Held(tokens, BeliefEvidence.KV_EVENTS)
        return found

    def why_lost(self, was: Residency | None) -> str | None:
        """Why the worker no longer holds what it did: `decode_restarted` or `evicted`; None: nothing was there."""
        view = None if was is None else self._view(was.worker)
        if was is None or view is None:
            return None
        return "evicted" if view.incarnation == was.incarnation else "decode_restarted"

    # -- what turns tell

    def residency(self, worker: WorkerId, tokens: int) -> Residency | None:
        """That this worker, as it is now, holds so many tokens; None for a worker that is gone."""
        view = self._view(worker)
        return None if view is None else Residency(worker, view.incarnation, tokens)

    def passed(self, history: int, marks: Iterable[Mark]) -> None:
        """A worker holds a prompt of this history, which has these marks."""
        for mark in marks:
            self._marks.pop(mark.key, None)
            self._marks[mark.key] = history << _BITS | min(mark.tokens, _MASK)
        if len(self._marks) > MARKS_KEPT:  # many at once, as to find the oldest entry of a dict takes time
            for key in list(islice(self._marks, MARKS_KEPT // 8)):
                del self._marks[key]

    def ended(self, history: int, holders: Iterable[Residency | None], marks: Sequence[Mark]) -> None:
        """A turn has ended, here or in another process, on these workers. marks: its prompt's, shortest first."""
        for where in holders:
            if where is not None:
                self.touch(history, where, marks)
        self.passed(history, marks)

    def touch(self, history: int, where: Residency, marks: Sequence[Mark] = ()) -> None:
        """The worker has used this history's prefix. Of an engine that has restarted since, or is gone, nothing stays.

        marks: the prompt's, shortest first.
        """
        book = self._book(where)
        if book is not None:
            shared = [mark for mark in marks if book.held(mark.key) or self._is_shared(mark.key, history)]
            book.touch(history, where.tokens, shared)

    def touched(self, worker: WorkerId, history: int) -> int:
        book = self._books.get(worker)
        return 0 if book is None else book.touched(history)

    def found(self, history: int, touched: int, where: Residency, cached: int) -> None:
        """An answer says how much of what was believed had been cached; see `CacheBook.found`."""
        book = self._book(where)
        if book is not None:
            book.found(history, touched, where.tokens, cached)

    def forget(self, history: int, workers: Iterable[WorkerId | None]) -> None:
        for worker in workers:
            book = None if worker is None else self._books.get(worker)
            if book is not None:
                book.forget(history)

    def capacities(self) -> dict[WorkerId, int]:
        """In tokens, as far as they are believed; 0: unknown."""
        return {worker: book.capacity for worker, book in self._books.items()}

    def _is_shared(self, key: int, history: int) -> bool:
        known = self._marks.get(key)
        return known is not None and known >> _BITS != history

    def _book(self, where: Residency) -> CacheBook | None:
        """The worker's, up to date; None if it is about an engine that is there no more."""
        view = self._view(where.worker)
        if view is None or view.incarnation != where.incarnation:
            return None
        book = self._books.get(where.worker)
        if book is None or book.incarnation != where.incarnation:
            for worker in [worker for worker in self._books if self._view(worker) is None]:
                del self._books[worker]
            book = self._books[where.worker] = CacheBook(where.incarnation)
        book.report(view.load.kv_capacity_tokens)
        return book


def marks_of(keys: Sequence[int], ends: Sequence[int], size: int, prompt_tokens: int) -> list[Mark]:
    """The first points of a prompt that other prompts may share, shortest first.

    ends: in bytes, as `size`, which is all of the prompt and has `prompt_tokens`.
    """
    marks = list[Mark]()
    for key, end in zip(keys, ends, strict=True):
        tokens = prompt_tokens * end // size if size else 0
        if tokens >= SHARED_TOKENS:
            marks.append(Mark(key, tokens))
            if len(marks) == MARKS:
                break
    return marks


def _shared(book: CacheBook, passed: Iterable[tuple[int, int]]) -> int:
    """What it holds of the longest mark that it knows, whether by an entry of its own or by a session's."""
    for key, known in passed:
        tokens = book.held(key) or min(book.held(known >> _BITS), known & _MASK)
        if tokens:
            return tokens
    return 0
