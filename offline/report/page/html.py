"""A document as one HTML page without other files: style, script and pictures are inside, and all text is escaped.

The page's content security policy forbids every request, and every script and style but its own, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from pathlib import Path
from string import Template
from typing import Final, assert_never

from .document import Block, Caution, Document, Picture, Section, Table, Terms, Text

SHRUNK: Final = 0.71  # a figure on the page, so that its text is as large as the page's own
_HERE: Final = Path(__file__).parent


def page(document: Document) -> str:
    style, script = _text("page.css"), _text("page.js")
    return Template(_text("page.html")).substitute(
        title=escape(document.title),
        lead=escape(document.lead),
        contents="\n".join(f'<li><a href="#{s.anchor}">{escape(s.title)}</a></li>' for s in document.sections),
        sections="\n".join(_section(section) for section in document.sections),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
    )


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def _section(section: Section) -> str:
    blocks = "\n".join(_block(block, f"{section.anchor}-{number}") for number, block in enumerate(section.blocks, 1))
    title = f'<h2 id="{section.anchor}-title">{escape(section.title)}</h2>'
    return f'<section id="{section.anchor}" aria-labelledby="{section.anchor}-title">\n{title}\n{blocks}\n</section>'


def _block(block: Block, anchor: str) -> str:
    match block:
        case Text():
            return f"<p>{escape(block.words)}</p>"
        case Caution():
            points = "".join(f"<li>{escape(point)}</li>" for point in block.points)
            return f'<div class="caution" role="note"><p>Read with care</p><ul>{points}</ul></div>'
        case Terms():
            entries = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in block.entries)
            return f"<dl>{entries}</dl>"
        case Picture():
            return _picture(block)
        case Table():
            return _folded(block, anchor) if block.folded else _table(block, anchor)
        case _:
            assert_never(block)


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    words = f"{picture.title}. {picture.message}"
    width, height = (round(SHRUNK * pixels) for pixels in picture.size)
    return (
        f'<figure id="{escape(picture.name)}"><div class="scroll" role="region" tabindex="0" '
        f'aria-label="{escape(picture.title)}">'
        f'<img src="data:image/png;base64,{data}" width="{width}" height="{height}" alt="{escape(words)}"></div>'
        f"<figcaption><b>{escape(picture.title)}.</b> {escape(picture.message)} {escape(picture.caption)}</figcaption>"
        "</figure>"
    )


def _table(table: Table, anchor: str) -> str:
    head = "".join(
        f'<th scope="col"{_class("label", number < table.labels or number in table.words)}>{escape(name)}</th>'
        for number, name in enumerate(table.head)
    )
    rows = "\n".join(f"<tr>{''.join(_cell(table, n, text) for n, text in enumerate(row))}</tr>" for row in table.rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-labelledby="{anchor}-caption">'
        f'<table id="{anchor}"><caption id="{anchor}-caption">{escape(table.caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
    )


def _folded(table: Table, anchor: str) -> str:
    return (
        f"<details><summary>Show {len(table.rows):,} rows</summary>"
        f'<div class="filter"><label for="{anchor}-filter">Rows that contain</label>'
        f'<input id="{anchor}-filter" type="search" data-filter="{anchor}" autocomplete="off" spellcheck="false">'
        f'<output id="{anchor}-shown" for="{anchor}-filter"></output></div>\n{_table(table, anchor)}</details>'
    )


def _cell(table: Table, number: int, text: str) -> str:
    if number < table.labels:
        return f'<th scope="row">{escape(text)}</th>'
    return f"<td{_class('words', number in table.words)}>{escape(text)}</td>"


def _class(name: str, applies: bool) -> str:
    return f' class="{name}"' if applies else ""
