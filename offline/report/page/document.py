"""The parts of a report before it is HTML: sections of text, cautions, terms, tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    words: str


@dataclass(frozen=True, slots=True)
class Caution:
    points: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    entries: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The first `labels` columns name a row, the others hold its figures."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int = 1
    words: tuple[int, ...] = ()  # columns of text among the figures
    folded: bool = False  # shown on demand, with a field that filters its rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    name: str  # of its file, without .png
    png: bytes
    title: str
    message: str  # what it shows, for those who do not see it
    caption: str  # how to read it

    @property
    def size(self) -> tuple[int, int]:
        # From the PNG's header, in pixels.
        return int.from_bytes(self.png[16:20]), int.from_bytes(self.png[20:24])


Block = Text | Caution | Terms | Table | Picture


@dataclass(frozen=True, slots=True)
class Section:
    anchor: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Document:
    title: str
    lead: str
    sections: tuple[Section, ...]

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return tuple(block for section in self.sections for block in section.blocks if isinstance(block, Picture))
