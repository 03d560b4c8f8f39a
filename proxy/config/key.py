"""One key of the config: what it is for and which values it may have, as its field says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, inspect

T = TypeVar("T")

LARGEST_INT = 2**53  # JSON and floats hold no larger whole number exactly
LARGEST_LIST = 10_000
SHOWN_CHARACTERS = 200  # of a value that is told

NO_CONTROL_CHARACTERS = r"^(?![\s\S]*[\x00-\x1f\x7f])"

Text = Annotated[str, Meta(max_length=4096, pattern=NO_CONTROL_CHARACTERS)]
Texts = Annotated[tuple[Text, ...], Meta(max_length=LARGEST_LIST)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]  # seconds where 0 means something, weights, shares
Share = Annotated[float, Meta(ge=0, le=1)]


def key(default: T, text: str, *, group: str = "", live: bool = False, secret: bool = False) -> T:
    """A field of the config. text: what it is for, in plain words and `code`.

    group: the heading over this key and those that follow it. live: it takes effect while the proxy runs.
    secret: its value is never shown, and may come from the environment.
    """
    made: T = field(default=default, metadata={"text": text, "group": group, "live": live, "secret": secret})
    return made


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    group: str
    text: str
    default: Any
    annotation: Any
    kind: inspect.Type
    is_live: bool
    is_secret: bool

    def fits(self, value: object) -> bool:
        try:
            self.take(value)
        except ValueError:
            return False
        return True

    def take(self, value: object, *, is_text: bool = False) -> Any:
        """The value in the key's own type; ValueError if it is not allowed.

        is_text: a string stands for a value of any type, as on a command line.
        """
        if isinstance(value, int) and abs(value) > LARGEST_INT:
            raise ValueError(self.name)
        try:
            taken = msgspec.convert(value, self.annotation, strict=not (is_text and isinstance(value, str)))
        except msgspec.ValidationError:
            raise ValueError(self.name) from None
        if isinstance(taken, (int, float)) and not (math.isfinite(taken) and abs(taken) <= LARGEST_INT):
            raise ValueError(self.name)
        return taken

    def shown(self, value: object) -> str:
        if self.is_secret:
            return "(hidden)"
        try:
            text = repr(value.value if isinstance(value, Enum) else value)
        except ValueError:  # of more digits than Python writes
            return "a number that is too long"
        return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"

    @property
    def variable(self) -> str:
        """The environment variable of a secret."""
        return f"PPD_{self.name.upper()}"

    @property
    def type_name(self) -> str:
        """One word, for a flag's help."""
        kind = _item(self.kind) or self.kind
        names = {inspect.IntType: "integer", inspect.FloatType: "number", inspect.BoolType: "boolean"}
        return names.get(type(kind), "text")

    @property
    def allowed(self) -> str:
        return _allowed(self.kind)

    @property
    def choices(self) -> tuple[str, ...]:
        """The only values that the key, or an item of its list, may have; empty if it is free."""
        return _choices(_item(self.kind) or self.kind)


def keys_of(config: type[Any]) -> Iterator[Key]:
    """The fields of a dataclass, in order."""
    hints, group = get_type_hints(config, include_extras=True), ""
    for one in fields(config):
        note, annotation = one.metadata, hints[one.name]
        group = note["group"] or group
        kind = _bare(inspect.type_info(annotation))
        yield Key(one.name, group, note["text"], one.default, annotation, kind, note["live"], note["secret"])


def wrong_part(value: object, fits: Callable[[tuple[object, ...]], bool]) -> object:
    """The first item that does not fit, of a list; else the value itself."""
    items = value if isinstance(value, (list, tuple)) else ()
    return next((item for item in items if not fits((item,))), value)


def _bare(kind: inspect.Type) -> inspect.Type:
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _item(kind: inspect.Type) -> inspect.Type | None:
    return _bare(kind.item_type) if isinstance(kind, inspect.VarTupleType) else None


def _choices(kind: inspect.Type) -> tuple[str, ...]:
    if isinstance(kind, inspect.EnumType):
        return tuple(str(member.value) for member in kind.cls)
    return tuple(map(str, kind.values)) if isinstance(kind, inspect.LiteralType) else ()


def _allowed(kind: inspect.Type) -> str:
    if choices := _choices(kind):
        return "one of " + ", ".join(choices)
    if (item := _item(kind)) is not None:
        choices = _choices(item)
        items = "any of " + ", ".join(choices) if choices else "strings without control characters"
        return f"a list of {items}, at most {LARGEST_LIST}"
    if isinstance(kind, inspect.StrType):
        return f"a string of at most {kind.max_length} characters, without control characters"
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    assert isinstance(kind, inspect.IntType | inspect.FloatType), kind
    return ("a whole number" if isinstance(kind, inspect.IntType) else "a number") + _bounds(kind)


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    above = f" above {kind.gt}" if kind.gt is not None else ""
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge} to {kind.le}"
    if kind.le is not None:
        return f"{above}, at most {kind.le}"
    if kind.ge is not None:
        above = f" of at least {kind.ge}"
    return above + (f", at most {kind.le}" if kind.le is not None else ", at most 2^53")
