"""The same modules twice: compiled where they are built, and as Python from the same files."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import ppd.proxy.beliefs as room
from ppd.proxy.beliefs import held

FOLDER = Path(room.__file__).parent
NAMES = ("entries", "cache_book", "beliefs", "turn_touches")  # each may import those before it


def uncompiled_beliefs() -> dict[str, Any]:
    """The room's modules that may be compiled, by name, as they run where they are not; values are the same ones."""
    package = ModuleType("ppd.proxy._uncompiled_beliefs")
    package.__path__ = []  # nothing else is found here
    sys.modules[package.__name__] = package
    sys.modules[f"{package.__name__}.held"] = held
    return {name: sys.modules.get(f"{package.__name__}.{name}") or _loaded(package.__name__, name) for name in NAMES}


def _loaded(package: str, name: str) -> ModuleType:
    spec = spec_from_file_location(f"{package}.{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
