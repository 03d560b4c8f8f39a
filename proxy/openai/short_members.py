"""Short members of a body: names, numbers and choices, each decoded when it is met."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.json import Decoder

from ..errors import RequestError
from .prompts.shapes import read

Values = dict[str, Any]
"""Members by their names, decoded."""

CAPS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_LIMIT = 64 * 1024  # bytes


def read_short(decoder: Decoder[Any], raw: msgspec.Raw, name: str) -> Any:
    """A member that holds a name, a number or a choice."""
    if memoryview(raw).nbytes > _LIMIT:
        raise RequestError(f"{name}: is longer than {_LIMIT} bytes", param=name)
    return read(decoder, raw, name)


def _integer(values: Values, name: str) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if value < 0 or value != int(value):
        raise RequestError(f"{name}: must be a whole number and not negative", param=name)
    return int(value)  # 10.0 is 10, as in the workers' own parsers


def caps(values: Values) -> list[int]:
    return [cap for name in CAPS if name in values and (cap := _integer(values, name)) is not None]


def priority_of(values: Values) -> int | None:
    value = values.get("priority")  # may be below 0
    if value is not None and (value != int(value) or abs(value) > 2**53):
        raise RequestError("priority: must be a whole number", param="priority")
    return None if value is None else int(value)


def count_of(values: Values, name: str) -> int:
    value = _integer(values, name)
    if value == 0:
        raise RequestError(f"{name}: must be at least 1", param=name)
    return 1 if value is None else value
