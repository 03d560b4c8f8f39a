"""The figures of docs/modes and docs/laws.md, and the measurements in the pages of the modes.

    python -m benchmarks.pages                  # all of them
    python -m benchmarks.pages slo oracle laws  # some

A figure of a mode is what the proxy's own `decide` says of a small fleet in a known state, with a shipped profile. The
measurements are those in benchmarks/results/policies.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from ppd.offline.goodput.modes import NAMES
from ppd.proxy.config import Mode

from .goodput import with_goodput
from .laws import laws_figure
from .maps import PANELS, map_figure
from .placement import PLACING, fraction_figure, placement_figure

DOCS: Final = Path(__file__).parents[2] / "docs"
LAWS: Final = "laws"
FIGURES: Final[Mapping[str, Callable[[], bytes]]] = {
    **{name: partial(map_figure, name) for name in PANELS},
    **{name: partial(placement_figure, name) for name in PLACING},
    Mode.FRACTION.value: fraction_figure,
    LAWS: laws_figure,
}


def figure_path(name: str) -> Path:
    return DOCS / "figures" / "laws.png" if name == LAWS else DOCS / "modes" / "figures" / f"{name}.png"


def page_path(name: str) -> Path:
    return DOCS / "modes" / f"{name}.md"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a mode, or laws; none: all")
    wanted = parser.parse_args(arguments).names or list(FIGURES)
    if unknown := [name for name in wanted if name not in FIGURES]:
        parser.error(f"{unknown[0]}: must be {', '.join(FIGURES)}")
    for name in wanted:
        data, path = FIGURES[name](), figure_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        print(f"{path.relative_to(DOCS.parent)}: {len(data):,} bytes")
        if name in NAMES:
            page = page_path(name)
            page.write_text(with_goodput(page.read_text(), name))


if __name__ == "__main__":
    main()
