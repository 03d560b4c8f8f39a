"""Finds the cells of a table that stand for a turn: the nearest one, or those around it with a share each.

A cell is known by its number: by context, then workload type, then QPS, as the axes list them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from .format import Axes
from .interpolation import TINY, Mix, Triangulation

_SQUARES = 8  # for each doubling: of so small a square of the plane nearly always one type is the nearest


class TableQuery(msgspec.Struct, frozen=True, gc=False):
    """What a turn is looked up by; `qps` counts what the table's `axes.qps_counts` says."""

    new_tokens: int
    cached_tokens: int
    output_tokens: int
    qps: float


class Nearest:
    """One cell for every turn, found axis by axis (the paper's Algorithm 1).

    Context: the class whose range holds the cached tokens; above all bounds, the last class. QPS: the nearest point,
    the higher one in a tie. Workload type: the measured (new, output) pair nearest in log space, the first in a tie.
    Logs, because costs are compared by ratio: 16 and 32 new tokens are as far apart as 512 and 1024. A pair's own
    centre always finds itself, which the published prototype's rules on new/output ratios do not ensure (16 -> 32 can
    never be `tiny` there).
    """

    __slots__ = ("_bounds", "_centres", "_last", "_midpoints", "_near", "_ranges")

    def __init__(self, axes: Axes) -> None:
        self._bounds = [context.max_tokens for context in axes.contexts]
        self._last = len(self._bounds) - 1
        self._centres = _centres(axes)
        self._near: dict[tuple[int, int], list[int]] = {}  # types that may be nearest, by the square of the logarithms
        self._midpoints = [(low + high) / 2 for low, high in pairwise(axes.qps)]
        new, output = [w.new_tokens for w in axes.workloads], [w.output_tokens for w in axes.workloads]
        self._ranges = (min(new), max(new), min(output), max(output), self._bounds[-1], axes.qps[0], axes.qps[-1])

    def cell(self, query: TableQuery) -> int:
        context = bisect_left(self._bounds, query.cached_tokens, 0, self._last)
        row = context * len(self._centres) + self._type(query.new_tokens, query.output_tokens)
        return row * (len(self._midpoints) + 1) + bisect_right(self._midpoints, query.qps)

    def covers(self, query: TableQuery) -> bool:
        """Whether the turn lies in the range of every axis, each by itself, not their combination."""
        min_new, max_new, min_output, max_output, max_cached, min_qps, max_qps = self._ranges
        return (
            min_new <= query.new_tokens <= max_new
            and min_output <= query.output_tokens <= max_output
            and 0 < query.cached_tokens <= max_cached
            and min_qps <= query.qps <= max_qps
        )

    def _type(self, new_tokens: int, output_tokens: int) -> int:
        new_log = math.log2(new_tokens if new_tokens > 1 else 1)
        output_log = math.log2(output_tokens if output_tokens > 1 else 1)
        square = int(_SQUARES * new_log), int(_SQUARES * output_log)
        near = self._near.get(square)
        if near is None:
            near = self._near[square] = self._near_all(*square)
        if len(near) == 1:
            return near[0]
        nearest, least = near[0], math.inf
        for kind in near:
            new, output = self._centres[kind]
            distance2 = (new - new_log) ** 2 + (output - output_log) ** 2
            if distance2 < least:
                nearest, least = kind, distance2
        return nearest

    def _near_all(self, new_square: int, output_square: int) -> list[int]:
        """The types that are nearest to any turn whose logarithms lie in this square."""
        half, least, most = 0.5 / _SQUARES, list[float](), list[float]()
        for new, output in self._centres:
            aside, above = abs(new - new_square / _SQUARES - half), abs(output - output_square / _SQUARES - half)
            least.append(max(0.0, aside - half) ** 2 + max(0.0, above - half) ** 2)
            most.append((aside + half) ** 2 + (above + half) ** 2)
        return [kind for kind, distance2 in enumerate(least) if distance2 <= min(most) + TINY]


class Around:
    """Up to twelve cells for every turn, with shares that sum to 1 and vary continuously with it.

    Linear in the logarithms of cached tokens, new tokens, output tokens and QPS: between the measured contexts and the
    QPS points on either side, and between the three measured workload types whose triangle holds the turn. On a
    measured point of an axis that point has the whole share; beyond an axis its nearest end has it.
    """

    __slots__ = ("_contexts", "_qps", "_types", "_types_count")

    def __init__(self, axes: Axes) -> None:
        self._contexts = _Scale([context.measured_tokens for context in axes.contexts])
        self._qps = _Scale(axes.qps)
        self._types = Triangulation(_centres(axes))
        self._types_count = len(axes.workloads)

    def mix(self, query: TableQuery) -> Mix:
        """`is_inside`: cached tokens and QPS lie between measured points, and the type between measured types."""
        new, output = max(query.new_tokens, 1), max(query.output_tokens, 1)
        contexts, types = self._contexts.mix(query.cached_tokens), self._types.mix(math.log2(new), math.log2(output))
        rates = self._qps.mix(query.qps)
        shares = tuple(
            ((context * self._types_count + kind) * self._qps.count + rate, by_context * by_kind * by_rate)
            for context, by_context in contexts.shares
            for kind, by_kind in types.shares
            for rate, by_rate in rates.shares
        )
        return Mix(shares, contexts.is_inside and types.is_inside and rates.is_inside)


class _Scale:
    """Rising points; values between them get shares by their logarithms."""

    __slots__ = ("_logs", "_points", "count")

    def __init__(self, points: Sequence[float]) -> None:
        self._points = points
        self._logs = [math.log2(point) for point in points]
        self.count = len(points)

    def mix(self, value: float) -> Mix:
        after = bisect_left(self._points, value)
        if after == self.count:
            return Mix(((after - 1, 1.0),), False)
        if value == self._points[after] or after == 0:
            return Mix(((after, 1.0),), value == self._points[after])
        before = after - 1
        span = self._logs[after] - self._logs[before]
        share = (math.log2(value) - self._logs[before]) / span if span else 0.0
        return Mix(((before, 1.0 - share), (after, share)), True)


def _centres(axes: Axes) -> list[tuple[float, float]]:
    return [(math.log2(w.new_tokens), math.log2(w.output_tokens)) for w in axes.workloads]
