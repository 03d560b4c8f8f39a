"""Prompts by what they begin with: a radix tree over ranges of tokens, which says what prompts have in common.

A token has an address: equal addresses at equal places, after equal beginnings, are equal tokens. So a prompt of
100,000 tokens is a few ranges, and as cheap to add. Each edge of the tree becomes a `Span`, and is cut into units where
a prompt or an answer ends inside of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .workers.kv_cache import Span


class TokenRange(NamedTuple):
    """Successive addresses."""

    start: int
    tokens: int


class Unit(NamedTuple):
    """A piece of a prompt that is never only partly in another one; its `id` also stands for all before it."""

    id: int
    tokens: int


class _Edge:
    __slots__ = ("children", "cuts", "id", "ranges", "tokens", "units")

    def __init__(self, ranges: list[TokenRange]) -> None:
        self.ranges = ranges
        self.tokens = sum([one.tokens for one in ranges])
        self.children: dict[int, _Edge] = {}  # by their first addresses
        self.cuts: set[int] = set()  # where a prompt or an answer ends, in tokens of the edge
        self.id = -1  # not given yet
        self.units: tuple[list[int], list[Unit]] = ([], [])  # their ends, in tokens of the edge, and they

    def split(self, at: int) -> None:
        rest = _Edge(beyond(self.ranges, at))
        rest.children, self.children = self.children, {rest.ranges[0].start: rest}
        rest.cuts = {cut - at for cut in self.cuts if cut > at}
        self.cuts = {cut for cut in self.cuts if cut <= at}
        self.ranges, self.tokens = cut_at(self.ranges, at), at

    def extend(self, ranges: list[TokenRange]) -> None:
        self.ranges = joined(self.ranges, ranges)
        self.tokens += sum([one.tokens for one in ranges])


class TokenTree:
    """Prompts are added before the first is asked for. `ids`: of spans and of units, which count up from 1."""

    def __init__(self) -> None:
        self._root = _Edge([])
        self.ids = 0

    def add(self, ranges: Sequence[TokenRange], cuts: Sequence[int]) -> None:
        """cuts: where units end, in tokens of the prompt."""
        edge, rest = self._root, list(ranges)
        while rest:
            child = edge.children.get(rest[0].start)
            if child is None:
                if edge is self._root or edge.children:
                    edge.children[rest[0].start] = _Edge(rest)
                else:
                    edge.cuts.add(edge.tokens)
                    edge.extend(rest)
                break
            shared = in_common(child.ranges, rest)
            rest = beyond(rest, shared)
            if rest and shared < child.tokens:
                child.split(shared)
            edge = child
        for cut in cuts:
            self._cut(ranges, cut)

    def spans(self, ranges: Sequence[TokenRange]) -> tuple[tuple[Span, ...], tuple[Unit, ...]]:
        """A prompt that was added, or one that ends at a cut of one."""
        spans: list[Span] = []
        units: list[Unit] = []
        for edge, tokens in self._path(ranges):
            if edge.id < 0:
                self._number(edge)
            ends, pieces = edge.units
            spans.append(Span(edge.id, tokens))
            units += pieces if tokens == edge.tokens else pieces[: bisect_right(ends, tokens)]
        return tuple(spans), tuple(units)

    def _number(self, edge: _Edge) -> None:
        ends = sorted(edge.cuts | {edge.tokens})
        begins = (0, *ends[:-1])
        edge.id = self.ids + 1
        edge.units = (
            ends,
            [Unit(edge.id + at, end - ends_at) for at, (ends_at, end) in enumerate(zip(begins, ends, strict=True))],
        )
        self.ids += len(ends)

    def _cut(self, ranges: Sequence[TokenRange], at: int) -> None:
        for edge, tokens in self._path(cut_at(ranges, at)):
            at -= tokens
            if not at:
                edge.cuts.add(tokens)

    def _path(self, ranges: Sequence[TokenRange]) -> Iterator[tuple[_Edge, int]]:
        """The edges along a prompt, and how many tokens of each it has."""
        edge, rest = self._root, list(ranges)
        while rest:
            edge = edge.children[rest[0].start]
            tokens = in_common(edge.ranges, rest)
            yield edge, tokens
            rest = beyond(rest, tokens)


def in_common(ours: Sequence[TokenRange], theirs: Sequence[TokenRange]) -> int:
    """How many tokens two prompts begin with alike."""
    total = 0
    mine, other = iter(ours), iter(theirs)
    (a, n), (b, m) = next(mine, _END), next(other, _END)
    while a == b and n and m:
        step = min(n, m)
        total += step
        a, n, b, m = a + step, n - step, b + step, m - step
        if not n:
            a, n = next(mine, _END)
        if not m:
            b, m = next(other, _END)
    return total


def cut_at(ranges: Sequence[TokenRange], tokens: int) -> list[TokenRange]:
    """The first `tokens` tokens."""
    kept: list[TokenRange] = []
    for one in ranges:
        if tokens <= 0:
            break
        kept.append(one if one.tokens <= tokens else TokenRange(one.start, tokens))
        tokens -= one.tokens
    return kept


def beyond(ranges: Sequence[TokenRange], tokens: int) -> list[TokenRange]:
    """All but the first `tokens` tokens."""
    left: list[TokenRange] = []
    for one in ranges:
        if tokens >= one.tokens:
            tokens -= one.tokens
            continue
        left.append(TokenRange(one.start + tokens, one.tokens - tokens) if tokens else one)
        tokens = 0
    return left


def joined(ranges: Sequence[TokenRange], more: Sequence[TokenRange]) -> list[TokenRange]:
    whole = list(ranges)
    for one in more:
        if whole and whole[-1].start + whole[-1].tokens == one.start:
            whole[-1] = TokenRange(whole[-1].start, whole[-1].tokens + one.tokens)
        else:
            whole.append(one)
    return whole


_END = TokenRange(0, 0)
