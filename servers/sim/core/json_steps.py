"""JSON of a schema, as steps: a text is written, any other sequence is chosen from, and the chosen one sent back.

Of JSON Schema: type, enum, const, properties, required, additionalProperties, items, prefixItems, anyOf, oneOf, allOf,
$ref within the schema, the bounds of numbers, lengths and counts, and a few formats. The rest is ignored. A client
wrote the schema, so a member of the wrong type counts as absent, and depth is bounded.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Generator, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

from .answer_text import CONSONANTS, VOWELS

Steps = Generator[Sequence[Any], Any, Any]
_Schema = dict[str, Any]

_DEEP, _DEEPEST = 6, 64  # from here as little as is allowed; from here only null
_REFERENCES = 16
_WIDTH = 999  # of the range of a number that has no bounds
_FARTHEST = 1e300  # bounds beyond it would overflow
_FORMATS = {  # # is any digit
    "date": "20##-07-1#",
    "time": "1#:2#:3#Z",
    "date-time": "20##-07-1#T1#:2#:3#Z",
    "uuid": "########-####-4###-8###-############",
    "email": "a####@example.com",
    "uri": "https://example.com/####",
    "ipv4": "10.1#.1#.2#",
}


def json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def value_steps(schema: Any) -> Steps:
    return _Walk(schema).value(schema, 0)


class _Walk:
    """root: where references start."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def value(self, given: Any, depth: int) -> Steps:
        schema = self._resolved(given)
        if depth >= _DEEPEST:
            yield "null"
        elif "const" in schema:
            yield json_text(schema["const"])
        elif listed := _list(schema, "enum"):
            yield json_text((yield listed))
        elif branches := _list(schema, "anyOf") or _list(schema, "oneOf"):
            rest = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")}
            chosen = (yield branches) if depth < _DEEP else branches[-1]
            yield from self.value(rest | self._resolved(chosen), depth + 1)
        else:
            kind = schema.get("type")
            if isinstance(kind, list) and kind:
                kind = (yield kind) if depth < _DEEP else kind[-1]
            yield from self._typed(kind, schema, depth)

    def _typed(self, kind: Any, schema: _Schema, depth: int) -> Steps:
        if kind == "object" or (kind is None and "properties" in schema):
            yield from self._object(schema, depth)
        elif kind == "array" or (kind is None and "items" in schema):
            yield from self._array(schema, depth)
        elif kind in ("boolean", "null"):
            yield json_text((yield (True, False)) if kind == "boolean" else None)
        elif kind == "integer":
            yield from _integer(schema)
        elif kind == "number":
            yield from _number(schema)
        else:
            yield from _string(schema)

    def _object(self, schema: _Schema, depth: int) -> Steps:
        further = schema.get("additionalProperties", True)
        properties = schema.get("properties")
        required = {name: None for name in _list(schema, "required") if isinstance(name, str)}
        if not isinstance(properties, dict):
            properties = {}
            if further is not False and not required:
                yield from self._free_object(further, depth)
                return
        names = [*properties, *(name for name in required if name not in properties)]
        musts = [at for at, name in enumerate(names) if name in required]
        yield "{"
        at, mark = 0, ""
        while at < len(names):
            # Any optional property may be next, up to the next required one or the end.
            following = bisect_left(musts, at)
            last = musts[following] if following < len(musts) else len(names)
            at = (yield range(at, last + 1)) if depth < _DEEP else last
            if at == len(names):
                break
            yield f"{mark}{json_text(names[at])}:"
            yield from self.value(properties.get(names[at], further), depth + 1)
            at, mark = at + 1, ","
        yield "}"

    def _free_object(self, values: Any, depth: int) -> Steps:
        count = (yield range(1, 4)) if depth < _DEEP else 0
        yield "{"
        for place in range(count):
            yield "," if place else ""
            yield '"'
            yield from _word(3, 6)
            yield f'{place}":'  # so no name comes twice
            yield from self.value(values, depth + 1)
        yield "}"

    def _array(self, schema: _Schema, depth: int) -> Steps:
        first = _list(schema, "prefixItems")
        least, most = _bounds(schema, "minItems", "maxItems", usual=max(1, len(first)), spread=2)
        is_fixed = first or depth >= _DEEP or schema.get("uniqueItems")
        if depth >= _DEEP and not _limit(schema, "minItems"):
            least = 0
        count = least if is_fixed else (yield range(least, most + 1))
        yield "["
        for place in range(count):
            yield "," if place else ""
            yield from self.value(first[place] if place < len(first) else schema.get("items"), depth + 1)
        yield "]"

    def _resolved(self, schema: Any) -> _Schema:
        for _ in range(_REFERENCES):
            if not isinstance(schema, dict):
                return {}
            reference, parts = schema.get("$ref"), _list(schema, "allOf")
            if isinstance(reference, str):
                target = self._target(reference)
            elif parts:
                target = {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}
            else:
                return schema
            rest = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
            schema = target | rest if isinstance(target, dict) else rest
        return {}

    def _target(self, reference: str) -> Any:
        found = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found


def _integer(schema: _Schema) -> Steps:
    step = _real(schema, "multipleOf")
    step = int(step) if step is not None and step >= 1 else 1
    low, high = _range(schema)
    least = None if low is None else math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
    most = None if high is None else math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
    if least is None:
        least = 0 if most is None or most >= 0 else most - _WIDTH * step
    first = -(-least // step) * step
    last = first + _WIDTH * step
    yield str((yield range(first, max(first, last if most is None else min(most, last)) + 1, step)))


def _number(schema: _Schema) -> Steps:
    low, high = _range(schema)
    least = low[0] if low is not None else 0.0 if high is None or high[0] > 0 else high[0] - 10
    most = max(least, high[0] if high is not None else least + 10)
    step = _real(schema, "multipleOf")
    if step is not None and step > 0 and math.isfinite(count := (most - least) / step):
        first = math.ceil(least / step) if math.isfinite(least / step) else 0
        skips = bool(low and low[1] and first * step == least)
        value = (first + (yield range(skips, max(skips + 1, min(int(count), 99))))) * step
    else:
        value = least + (most / 100 - least / 100) * (yield range(1, 100))
    short = round(value, 9)
    yield json_text(short if least < short < most else value)


def _string(schema: _Schema) -> Steps:
    yield '"'
    form = schema.get("format")
    if isinstance(form, str) and form in _FORMATS:
        for letter in _FORMATS[form]:
            yield str((yield range(10))) if letter == "#" else letter
    else:
        yield from _word(*_bounds(schema, "minLength", "maxLength", usual=3, spread=9))
    yield '"'


def _word(least: int, most: int) -> Steps:
    for place in range((yield range(least, most + 1))):
        yield (yield tuple(VOWELS if place % 2 else CONSONANTS))


def _bounds(schema: _Schema, low: str, high: str, *, usual: int, spread: int) -> tuple[int, int]:
    """From the least to the most of a count, the most at most `spread` further."""
    least, most = _limit(schema, low), _limit(schema, high)
    if least is None:
        least = usual if most is None else min(usual, most)
    return least, least + spread if most is None else max(least, min(most, least + spread))


def _limit(schema: _Schema, name: str) -> int | None:
    value = _real(schema, name)
    return None if value is None or value < 0 else int(value)


_Bound = tuple[float, bool]


def _range(schema: _Schema) -> tuple[_Bound | None, _Bound | None]:
    """The tightest lower and upper bound, each with whether it is excluded."""
    lows = [
        (value, is_out)
        for name, is_out in (("minimum", False), ("exclusiveMinimum", True))
        if (value := _real(schema, name)) is not None
    ]
    highs = [
        (value, not is_out)
        for name, is_out in (("maximum", False), ("exclusiveMaximum", True))
        if (value := _real(schema, name)) is not None
    ]
    low, high = max(lows, default=None), min(highs, default=None)
    return low, None if high is None else (high[0], not high[1])


def _real(schema: _Schema, name: str) -> float | None:
    value = schema.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _FARTHEST:
        return None
    return value


def _list(schema: _Schema, name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []
