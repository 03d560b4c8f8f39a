"""Whether the compiled modules of the room are whole."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from ppd.proxy.beliefs import COMPILED, check_whole

BUILT = [f"{name}{EXTENSION_SUFFIXES[0]}" for name in COMPILED]


def test_what_can_be_compiled_is_what_says_its_types() -> None:
    folder = Path(__file__).parents[3] / "proxy" / "beliefs"
    assert sorted(COMPILED) == sorted(file.stem for file in folder.glob("*.pxd"))


@pytest.mark.parametrize("built", [[], BUILT])
def test_all_or_none_of_them_may_be_there(tmp_path: Path, built: list[str]) -> None:
    for name in built:
        (tmp_path / name).touch()
    check_whole(tmp_path)


@pytest.mark.parametrize("missing", range(len(COMPILED)))
def test_a_part_of_them_is_refused_by_name(tmp_path: Path, missing: int) -> None:
    for name in BUILT[:missing] + BUILT[missing + 1 :]:
        (tmp_path / name).touch()
    with pytest.raises(ImportError, match=f"{COMPILED[missing]} is not compiled, and the others are: build .* again"):
        check_whole(tmp_path)
