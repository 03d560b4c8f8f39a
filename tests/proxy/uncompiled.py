"""The same modules twice: compiled where they are built, and as Python from the same files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any


def uncompiled_beliefs() -> dict[str, Any]:
    return uncompiled("beliefs", ["entries", "cache_book", "beliefs", "turn_touches"], others=["held"])


def uncompiled_sessions() -> dict[str, Any]:
    names = ["text_kinds", "token_estimates", "message_units"]
    return uncompiled("sessions", names, others=["hasher", "prefix_chain"])


def uncompiled(room: str, names: Sequence[str], others: Sequence[str]) -> dict[str, Any]:
    """Modules of a room of the proxy that may be compiled, by name, as they run where they are not.

    names: each may import those before it; others: what else of the room they import, which stays the same.
    """
    package = ModuleType(f"ppd.proxy._uncompiled_{room}")
    package.__path__ = []  # nothing else is found here
    sys.modules[package.__name__] = package
    for name in others:
        sys.modules[f"{package.__name__}.{name}"] = import_module(f"ppd.proxy.{room}.{name}")
    folder = Path(import_module(f"ppd.proxy.{room}").__path__[0])
    return {
        name: sys.modules.get(f"{package.__name__}.{name}") or _loaded(package.__name__, folder, name) for name in names
    }


def is_compiled(*modules: ModuleType) -> bool:
    return not any(str(module.__file__).endswith(".py") for module in modules)


def _loaded(package: str, folder: Path, name: str) -> ModuleType:
    spec = spec_from_file_location(f"{package}.{name}", folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
