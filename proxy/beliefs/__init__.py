"""What each worker holds of a prompt, and on which evidence."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

COMPILED: Final = ("beliefs", "cache_book", "entries", "turn_touches")


def check_whole(folder: Path) -> None:
    """ImportError where some of the modules are compiled and others are not: those read each other's fields in C, and
    would say no more than that a size has changed."""
    missing = [name for name in COMPILED if not any((folder / f"{name}{end}").exists() for end in EXTENSION_SUFFIXES)]
    if 0 < len(missing) < len(COMPILED):
        verb = "is" if len(missing) == 1 else "are"
        raise ImportError(
            f"{folder}: {', '.join(missing)} {verb} not compiled, and the others are: build PPD again, or remove those"
        )


check_whole(Path(__file__).parent)
