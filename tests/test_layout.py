"""The structure that the documents promise: packages that ship, and arrows that point one way."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = ("proxy", "servers", "offline", "benchmarks")  # each may import those before it
SOURCES = sorted(path for top in ORDER for path in (ROOT / top).rglob("*.py"))


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way_and_go_through_ppd(path: Path) -> None:
    top = path.relative_to(ROOT).parts[0]
    later = ORDER[ORDER.index(top) + 1 :]
    for name in imported(path):
        assert name.split(".")[0] not in ("proxy", "servers", "offline"), f"{name}: import it as ppd.{name}"
        assert not any(name == f"ppd.{other}" or name.startswith(f"ppd.{other}.") for other in later), name


def test_every_package_folder_ships() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        "ppd." + ".".join(init.parent.relative_to(ROOT).parts)
        for top in ("proxy", "servers", "offline")
        for init in (ROOT / top).rglob("__init__.py")
    }
    assert folders | {"ppd.tables"} == set(settings["packages"])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_one_noun_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
