"""The metrics' names and labels: as the code declares them, and as docs/metrics.md tells of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from benchmarks.small.structure import tree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "metrics.md"
_SUFFIX = re.compile(r"_(total|bucket|sum|count)$")


def bare(name: str) -> str:
    """Of a sample or a counter, the metric's name in the code."""
    return _SUFFIX.sub("", name)


@cache
def declared() -> dict[str, set[str]]:
    """The metrics that are declared anywhere in the code: name -> labels."""
    found: dict[str, set[str]] = {}
    for folder in ("proxy", "servers/sidecar"):
        for path in (ROOT / folder).rglob("*.py"):
            for function in ast.walk(tree(path)):
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.update(_declared_in(function))
    return found


def _declared_in(function: ast.AST) -> Iterator[tuple[str, set[str]]]:
    named: dict[str, ast.expr] = {}  # labels and texts that have a name first
    for assigned in (node for node in ast.walk(function) if isinstance(node, ast.Assign)):
        target, value = assigned.targets[0], assigned.value
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        values = value.elts if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) else [value]
        named |= {name.id: one for name, one in zip(names, values, strict=False) if isinstance(name, ast.Name)}
    for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
        given = [*call.args, *(each.value for each in call.keywords if each.arg == "labels")]
        given = [named.get(one.id, one) if isinstance(one, ast.Name) else one for one in given]
        parts = [part for one in given for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
        texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        if texts and re.fullmatch(r"ppd_[a-z_]+", texts[0]):
            yield texts[0], {text for text in texts[1:] if re.fullmatch("[a-z]+", text)}


@cache
def documented() -> dict[str, set[str]]:
    """As `declared`, by the tables of docs/metrics.md; a counter has its `_total` there."""
    rows = re.findall(r"^\| (`ppd_[^|]+`) \|([^|]*)\| .+ \|$", PAGE.read_text(), re.MULTILINE)
    return {
        bare(name): set(re.findall(r"`(\w+)`", labels))
        for names, labels in rows
        for name in re.findall(r"`(ppd_\w+)`", names)
    }
