"""Linear interpolation between scattered points of a plane: in Delaunay's triangles between them, or along a line.

Nothing here knows what the points stand for. A table has about ten of them, so the triangles are found by trying all.
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

TINY = 1e-9  # a share, a distance or a doubled area up to here may be a rounding error of 0
_JITTER = 1e-9


class Mix(msgspec.Struct, frozen=True):
    """A point of the plane as a weighted mean of the given points."""

    shares: Shares
    is_inside: bool  # False: it lies outside the hull, and the nearest point on the hull's border stands for it


class Triangulation:
    """Mixes vary continuously over the plane; on a given point the mix is that point alone.

    Within the given points' convex hull a mix is of the three corners of a triangle, so that anything linear in the
    coordinates comes out exact. The triangles are Delaunay's, because they avoid long thin ones: no given point lies
    inside the circle through a triangle's corners. Outside the hull, the nearest point on its border is used. The hull
    of points on one line is a segment, that of one point is the point.
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
        return Mix(_nonzero(zip(ends, (1.0 - along, along), strict=True)), distance < TINY)


class _Triangle:
    """The numbers of its corners, and each corner's share as a linear function of x and y."""

    __slots__ = ("_corners", "_factors")

    def __init__(self, corners: Corners, points: Sequence[Point]) -> None:
        self._corners = corners
        a, b, c = (points[corner] for corner in corners)
        area2 = _doubled_area(a, b, c)
        self._factors = (*_share_of_corner(b, c, area2), *_share_of_corner(c, a, area2))

    def shares(self, x: float, y: float) -> Shares | None:
        ax, ay, a0, bx, by, b0 = self._factors
        a = ax * x + ay * y + a0
        b = bx * x + by * y + b0
        c = 1.0 - a - b
        if a < -TINY or b < -TINY or c < -TINY:
            return None
        return _nonzero(zip(self._corners, (a, b, c), strict=True))


class _Edge:
    """A segment between two points, or a single point."""

    __slots__ = ("_dx", "_dy", "_length2", "_start", "ends")

    def __init__(self, a: int, b: int, points: Sequence[Point]) -> None:
        self.ends = (a, b)
        self._start = points[a]
        self._dx, self._dy = points[b][0] - points[a][0], points[b][1] - points[a][1]
        self._length2 = self._dx**2 + self._dy**2

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The distance from the edge, and where on the edge (0 to 1) it is nearest."""
        px, py = x - self._start[0], y - self._start[1]
        along = (px * self._dx + py * self._dy) / self._length2 if self._length2 else 0.0
        along = min(max(along, 0.0), 1.0)
        return math.hypot(px - along * self._dx, py - along * self._dy), along


def _doubled_area(a: Point, b: Point, c: Point) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (c[0] - a[0]) * (b[1] - a[1])  # below 0: the corners run clockwise


def _share_of_corner(b: Point, c: Point, area2: float) -> tuple[float, float, float]:
    return (b[1] - c[1]) / area2, (c[0] - b[0]) / area2, (b[0] * c[1] - c[0] * b[1]) / area2  # times x, y and 1


def _nonzero(shares: Iterable[tuple[int, float]]) -> Shares:
    kept = [(number, share) for number, share in shares if share > TINY]
    whole = sum(share for _, share in kept)
    return tuple((number, share / whole) for number, share in kept)


def _delaunay(points: Sequence[Point]) -> list[Corners]:
    """The triangles; none if all points lie on one line.

    Lifted to its squared distance from the origin, a point lies inside the circle through three others exactly if it
    lies below the plane through them. The corners of a rectangle lie on one circle: a fixed jitter decides for one of
    its diagonals.
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
    """The hull's edges: those of one triangle only. Without triangles, the segments between neighbours on the line."""
    if triangles:
        edges = Counter(edge for corners in triangles for edge in combinations(corners, 2))
        return [edge for edge, count in edges.items() if count == 1]
    ordered = sorted(range(len(points)), key=lambda number: points[number])
    return list(pairwise(ordered)) or [(0, 0)]
