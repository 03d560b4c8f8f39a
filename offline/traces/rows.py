"""The rows of a file: JSON lines, one JSON document, a list of them, or CSV; gzipped or not."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from ppd.proxy.errors import FormatError

from ..experiment.files import UNREADABLE

Count = Annotated[int, msgspec.Meta(ge=0)]
Tokens = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]

T = TypeVar("T")

_GZIP = b"\x1f\x8b"


class Rows:
    def __init__(self, path: Path, data: bytes) -> None:
        self._path = path
        self._data = data

    @classmethod
    def load(cls, path: Path) -> Rows:
        try:
            data = path.read_bytes()
            return cls(path, gzip.decompress(data) if data.startswith(_GZIP) else data)
        except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
            raise FormatError(f"{path}: not a whole gzip file: {exc}") from exc
        except OSError as exc:
            raise FormatError(f"{path}: {exc.strerror}") from exc

    @property
    def name(self) -> str:
        return str(self._path)

    @property
    def is_empty(self) -> bool:
        return self._data.strip(b"\xef\xbb\xbf \t\r\n") in (b"", b"[]")

    def header(self) -> tuple[str, ...]:
        line = self._data.lstrip(b"\xef\xbb\xbf").split(b"\n", 1)[0]
        return tuple(name.strip() for name in line.decode("utf-8", "replace").split(","))

    def members(self) -> frozenset[str]:
        """Member names of the first JSON object; empty where the file holds none."""
        for _, document in self._documents(first=True):
            try:
                return frozenset(msgspec.json.decode(document, type=dict[str, msgspec.Raw]))
            except UNREADABLE:
                break
        return frozenset()

    def json(self, kind: type[T]) -> Iterator[tuple[str, T]]:
        """Each document as `kind`, with its place in words."""
        decoder = msgspec.json.Decoder(kind)
        for where, document in self._documents():
            try:
                yield where, decoder.decode(document)
            except UNREADABLE as exc:
                raise self.error(where, str(exc)) from exc

    def csv(self, names: Sequence[str], optional: Sequence[str] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The columns asked for, in that order; a missing optional one is empty."""
        lines = csv.reader(self._data.decode("utf-8-sig", "replace").splitlines())
        header = [name.strip() for name in next(lines)]
        columns = [header.index(name) for name in names]
        extra = [header.index(name) if name in header else None for name in optional]
        for values in lines:
            where = f"line {lines.line_num}"
            if not values:
                continue
            if len(values) != len(header):
                raise self.error(where, f"must have {len(header)} columns, has {len(values)}")
            rest = ("" if column is None else values[column] for column in extra)
            yield where, (*(values[column] for column in columns), *rest)

    def number(self, where: str, name: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise self.error(where, f"{name}: must be a number and not negative, got {text!r}")
        return value

    def time_s(self, where: str, name: str, text: str) -> float:
        """From seconds, or a date and time, which is UTC where it has no zone."""
        with suppress(ValueError):
            if math.isfinite(seconds := float(text)):
                return seconds
        try:
            at = datetime.fromisoformat(text)
        except ValueError as exc:
            raise self.error(where, f"{name}: must be seconds or a date and time, got {text!r}") from exc
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()

    def error(self, where: str, what: str) -> FormatError:
        return FormatError(f"{self._path}: {where}: {what}")

    def _documents(self, *, first: bool = False) -> Iterator[tuple[str, bytes]]:
        if self._data.lstrip()[:1] == b"[":
            yield from self._items()
            return
        for number, line in enumerate(self._data.split(b"\n"), 1):
            if not line.strip():
                continue
            if number == 1 and not first and self._is_one_document(line):
                yield "the document", self._data
                return
            yield f"line {number}", self._data if first and self._is_one_document(line) else line

    def _items(self) -> Iterator[tuple[str, bytes]]:
        try:
            items = msgspec.json.decode(self._data, type=list[msgspec.Raw])
        except UNREADABLE as exc:
            raise FormatError(f"{self._path}: not a JSON list: {exc}") from exc
        for number, item in enumerate(items, 1):
            yield f"item {number}", bytes(item)

    def _is_one_document(self, line: bytes) -> bool:
        return not _is_json(line) and line.lstrip()[:1] == b"{" and _is_json(self._data)


def _is_json(data: bytes) -> bool:
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except UNREADABLE:
        return False
    return True
