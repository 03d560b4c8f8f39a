"""How the figures look: as those of the reports, at a size for a page, and small enough for a repository."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Final

from matplotlib.artist import Artist
from matplotlib.figure import Figure

DPI: Final = 100
INKS: Final = 48  # of a picture, edges of letters included
COLOURS: Final[Mapping[str, str]] = {  # of Okabe and Ito
    "blue": "#0072B2",
    "sky": "#8CC8EE",
    "red": "#D55E00",
    "yellow": "#F0C060",
    "green": "#009E73",
    "pink": "#CC79A7",
    "black": "#000000",
}


def legend(figure: Figure, entries: Sequence[Artist]) -> None:
    """In one row above the panels."""
    figure.legend(handles=list(entries), loc="outside upper center", ncols=len(entries), frameon=False)


def png(figure: Figure) -> bytes:
    """Equal figures are equal bytes."""
    from PIL import Image  # comes with Matplotlib

    raw, small = io.BytesIO(), io.BytesIO()
    figure.savefig(raw, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    with Image.open(raw) as image:
        image.convert("RGB").quantize(INKS, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return small.getvalue()


def tokens(count: float) -> str:
    """1024 and 1000 are both 1k."""
    if count < 1000:
        return f"{count:g}"
    return f"{count / 1024:g}k" if count % 1024 == 0 else f"{count / 1000:g}k"
