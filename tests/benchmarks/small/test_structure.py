"""The figures of a checkout's structure, on one that is made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.small.structure import Import, classes, documented, fullest, imports, rings

ROUTE = '    def route(self) -> None:\n        """Once."""\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "__init__.py": "",
        "app.py": "from ppd.proxy.routing.router import Router\nfrom .errors import Oops\n",
        "errors.py": "class Oops(Exception): ...\n",
        "routing/__init__.py": "from .router import Router\n",
        "routing/router.py": "from ..fleet import view\nclass Router:\n" + ROUTE,
        "fleet/__init__.py": "",
        "fleet/view.py": "def views() -> None:\n    from ..routing import Router\nclass Router: ...\nclass _Own: ...\n",
    }
    for name, text in files.items():
        path = tmp_path / "proxy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_imports_are_followed_to_the_module_in_every_form(root: Path) -> None:
    found = {(one.source, one.target, one.line) for one in imports(root, "proxy")}
    assert found == {
        ("app", "routing.router", 1),
        ("app", "errors", 2),
        ("routing", "routing.router", 1),
        ("routing.router", "fleet.view", 1),
        ("fleet.view", "routing", 2),
    }
    assert all(isinstance(one, Import) and one.path.is_file() for one in imports(root, "proxy"))


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ("ab bc", []),
        ("ab bc ca cd", [{"a", "b", "c"}]),
        ("ab ba cd dc bc", [{"a", "b"}, {"c", "d"}]),
        ("aa ab", []),  # a room's own modules may import each other
    ],
)
def test_a_ring_is_who_reaches_each_other(edges: str, expected: list[set[str]]) -> None:
    assert rings((edge[0], edge[1]) for edge in edges.split()) == expected


def test_classes_docstrings_and_folders_are_counted(root: Path) -> None:
    assert {name: len(paths) for name, paths in classes(root, ["proxy"]).items()} == {"Oops": 1, "Router": 2}
    assert documented(root, "proxy") == (1, 2)
    assert fullest(root, "proxy") == (2, "proxy")
