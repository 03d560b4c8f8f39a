"""Linear interpolation between scattered points of a plane: in triangles between them (Delaunay's), or along a line.

Nothing here knows what the points stand for. A table has some ten of them, so the triangles are found by trying all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from random import Random

import msgspec

Point = tuple[float, float]
Corners = tuple[int, int, int]  # of a triangle: numbers of points, rising
Shares = tuple[tuple[int, float], ...]  # numbers of points, and shares above 0 that sum to 1

TINY = 1e-9  # a share, a distance or twice an area that rounding may have made of nothing
_JITTER = 1e-9


class Mix(msgspec.Struct, frozen=True):
    """A place as a mean of points."""

    shares: Shares
    is_inside: bool  # False: the place lies beyond the points, and the border nearest to it is meant


class Triangulation:
    """Mixes vary continuously with the place; on a point the mix is that point alone.

    A place within the points' convex hull is the mean of the three corners of its triangle, so that anything linear in
    the coordinates comes out exact. Of all ways to make triangles Delaunay's is taken, as it avoids long thin ones:
    no other point lies inside the circle through a triangle's corners. Beyond the hull, the nearest place on its border
    is meant. Points that lie on one line have a stretch of it for a hull, one point has itself.
    """

    __slots__ = ("_border", "_points", "_triangles")

    def __init__(self, points: Sequence[Point]) -> None:
        """`points` are distinct, and there is at least one."""
        triangles = _delaunay(points)
        self._points = {point: number for number, point in enumerate(points)}
        self._triangles = [_Triangle(corners, points) for corners in triangles]
        self._border = [_Edge(a, b, points) for a, b in _border(triangles, points)]

    def mix(self, x: float, y: float) -> Mix:
        known = self._points.get((x, y))
        if known is not None:
            return Mix(((known, 1.0),), True)
        for triangle in self._triangles:
            shares = triangle.shares(x, y)
            if shares is not None:
                return Mix(shares, True)
        distance, along, ends = min((*edge.nearest(x, y), edge.ends) for edge in self._border)
        return Mix(_without_nothing(zip(ends, (1.0 - along, along), strict=True)), distance < TINY)


class _Triangle:
    """Its corners' numbers, and each one's share as a linear function of the place."""

    __slots__ = ("_corners", "_factors")

    def __init__(self, corners: Corners, points: Sequence[Point]) -> None:
        self._corners = corners
        a, b, c = (points[corner] for corner in corners)
        area2 = _doubled_area(a, b, c)
        self._factors = (*_share_of_corner(b, c, area2), *_share_of_corner(c, a, area2))

    def shares(self, x: float, y: float) -> Shares | None:
        """None for a place outside of it."""
        ax, ay, a0, bx, by, b0 = self._factors
        a = ax * x + ay * y + a0
        b = bx * x + by * y + b0
        c = 1.0 - a - b
        if a < -TINY or b < -TINY or c < -TINY:
            return None
        return _without_nothing(zip(self._corners, (a, b, c), strict=True))


class _Edge:
    """A stretch between two points, or a single one."""

    __slots__ = ("_dx", "_dy", "_length2", "_start", "ends")

    def __init__(self, a: int, b: int, points: Sequence[Point]) -> None:
        self.ends = (a, b)
        self._start = points[a]
        self._dx, self._dy = points[b][0] - points[a][0], points[b][1] - points[a][1]
        self._length2 = self._dx**2 + self._dy**2

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The distance of the place from the edge, and the share of the edge at which it is nearest."""
        px, py = x - self._start[0], y - self._start[1]
        along = (px * self._dx + py * self._dy) / self._length2 if self._length2 else 0.0
        along = min(max(along, 0.0), 1.0)
        return math.hypot(px - along * self._dx, py - along * self._dy), along


def _doubled_area(a: Point, b: Point, c: Point) -> float:
    """Its sign says on which side the corners turn."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (c[0] - a[0]) * (b[1] - a[1])


def _share_of_corner(b: Point, c: Point, area2: float) -> tuple[float, float, float]:
    """A corner's share in its triangle with `b` and `c`, as factors of x, of y, and of 1."""
    return (b[1] - c[1]) / area2, (c[0] - b[0]) / area2, (b[0] * c[1] - c[0] * b[1]) / area2


def _without_nothing(shares: Iterable[tuple[int, float]]) -> Shares:
    kept = [(number, share) for number, share in shares if share > TINY]
    whole = sum(share for _, share in kept)
    return tuple((number, share / whole) for number, share in kept)


def _delaunay(points: Sequence[Point]) -> list[Corners]:
    """The triangles; none where all points lie on one line.

    Lifted by its squared distance from the origin, a point lies inside the circle through three others just if it lies
    below the plane through them. Corners of a rectangle lie on one circle; a jitter, always the same, decides for one
    of its diagonals.
    """
    random = Random(0)
    heights = [x * x + y * y + _JITTER * random.random() for x, y in points]

    def has_empty_circle(corners: Corners) -> bool:
        a, b, c = (points[corner] for corner in corners)
        area2 = _doubled_area(a, b, c)
        if abs(area2) < TINY:
            return False
        over_a, over_b, over_c = (heights[corner] for corner in corners)
        for number, point in enumerate(points):
            by_a, by_b = _doubled_area(point, b, c) / area2, _doubled_area(a, point, c) / area2
            plane = by_a * over_a + by_b * over_b + (1.0 - by_a - by_b) * over_c
            if heights[number] < plane and number not in corners:
                return False
        return True

    return [corners for corners in combinations(range(len(points)), 3) if has_empty_circle(corners)]


def _border(triangles: Sequence[Corners], points: Sequence[Point]) -> list[tuple[int, int]]:
    """The hull's edges: those of one triangle only. Without triangles, the stretches between neighbours on the line."""
    if triangles:
        edges = Counter(edge for corners in triangles for edge in combinations(corners, 2))
        return [edge for edge, count in edges.items() if count == 1]
    ordered = sorted(range(len(points)), key=lambda number: points[number])
    return list(pairwise(ordered)) or [(0, 0)]
