"""Writes a report: the page as index.html, its figures beside it as PNG, and every number as cells.csv."""

from __future__ import annotations

from pathlib import Path

from ..experiment.files import write_whole
from ..sweep.folder import SweepFolder
from .analysis import study
from .figures import numbers
from .figures.style import is_own
from .page.document import Document
from .page.html import page
from .paper import comparison, figure_5, published
from .sections import document


def write_report(folder: Path) -> Path:
    """DIR/report/index.html; FormatError where there is no sweep, no run, or a file that cannot be read."""
    of_sweep = study.of_sweep(folder)
    return _write(SweepFolder(folder).report, document(of_sweep), of_sweep)


def write_published_report(rows: Path, out: Path, description: Path | None = None) -> Path:
    """`out`/index.html. description: what the rows mean; the .toml file beside them if not given."""
    beside = rows.with_name(rows.name.removesuffix(".gz").removesuffix(".csv") + ".toml")
    of_rows = published.of_rows(rows, description or beside)
    beside_paper = comparison.sections(of_rows.cells)
    if (figure := figure_5.section(of_rows.tables)) is not None:
        beside_paper.append(figure)
    return _write(out, document(of_rows, beside_paper), of_rows)


def _write(out: Path, made: Document, of: study.Study) -> Path:
    # The page is written after its figures, so none is ever missing. Figures of an earlier page go last.
    pictures = {out / f"{picture.name}.png": picture.png for picture in made.pictures}
    for path, png in pictures.items():
        write_whole(path, png)
    write_whole(out / "cells.csv", numbers.csv(of.cells))
    write_whole(out / "index.html", page(made).encode())
    for path in out.glob("*.png"):
        if path not in pictures and is_own(path.read_bytes()):
            path.unlink()
    return out / "index.html"
