"""What a reader of the code meets: folders, rings of imports, doubled names, and the files that one turn enters.

    python -m benchmarks.small.structure
    python -m benchmarks.small.structure --root OTHER --python OTHER/.venv/bin/python   # another checkout

`--no-walk` leaves the turns out, which start a proxy and two simulated engines. `tests/test_layout.py` has the limits.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click

from ppd.servers.fleet.ports import free_ports

PACKAGES = ("proxy", "servers", "offline", "benchmarks")
LIMIT_S = 60.0

# Runs `ppd serve` and notes each function that is called between SIGUSR1 and SIGUSR2, in the order of the first calls.
WALKER = """
import json, signal, sys
from importlib.metadata import entry_points

seen, out = {}, sys.argv.pop(1)

def note(frame, event, _):
    if event == "call":
        seen.setdefault((frame.f_code.co_filename, frame.f_code.co_qualname))

def begin(*_):
    seen.clear()
    sys.setprofile(note)

def end(*_):
    sys.setprofile(None)
    with open(out, "w") as file:
        json.dump(list(seen), file)

signal.signal(signal.SIGUSR1, begin)
signal.signal(signal.SIGUSR2, end)
(main,) = entry_points(group="console_scripts", name="ppd")
main.load()()
"""


@dataclass(frozen=True, slots=True)
class Import:
    """`source` and `target` are modules by their path in the package, as `routing.router`; `__init__` is its folder."""

    source: str
    target: str
    path: Path
    line: int


@dataclass(frozen=True, slots=True)
class Walk:
    """What one turn entered, each once, in the order of the first entry."""

    functions: int
    files: tuple[str, ...]  # in the package `proxy`
    rooms: tuple[str, ...]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def statements(path: Path) -> tuple[ast.AST, ...]:
    """Imports and definitions among them; what is inside of expressions is not looked at, which takes far longer."""
    found: list[ast.AST] = [tree(path)]
    for node in found:  # grows meanwhile
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            found += getattr(node, part, ())
    return tuple(found)


def modules(root: Path, package: str) -> dict[str, Path]:
    """Modules by name, the package's own `__init__` as an empty one."""
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root / package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def compiled(root: Path, package: str) -> Iterator[tuple[str, Path]]:
    """Sources of compiled modules by the module's name, which may have two: `.pyx` and `.pxd`."""
    for path in sorted((root / package).rglob("*.p[yx][xd]")):
        yield ".".join(path.relative_to(root / package).with_suffix("").parts), path


def imports(root: Path, package: str) -> Iterator[Import]:
    """Imports inside one package, relative ones and those by `ppd.`; those for type checkers alone count too."""
    known = modules(root, package)
    sources = [*known.items(), *compiled(root, package)]
    names = {name for name, _ in sources}
    for name, path in sources:
        folder = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        for line, node in _from_imports(path):
            if node.level:
                base = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
            elif (node.module or "").startswith(f"ppd.{package}"):
                base = (node.module or "").split(".")[2:]
            else:
                continue
            within = ".".join(part for part in base if part)
            for alias in node.names:
                target = f"{within}.{alias.name}".lstrip(".")
                yield Import(name, target if target in names else within, path, line)


# Cython's statement is Python's but for one letter; names in brackets may take several lines.
_FROM_IMPORT = re.compile(r"^[ \t]*from +(\.*[\w.]*) +c?import +(\([^)]*\)|[^\n(#]+)", re.MULTILINE)


def _from_imports(path: Path) -> Iterator[tuple[int, ast.ImportFrom]]:
    """With their lines. A compiled module is not Python, so its statements are found by their looks."""
    if path.suffix == ".py":
        yield from ((node.lineno, node) for node in statements(path) if isinstance(node, ast.ImportFrom))
        return
    text = path.read_text()
    for found in _FROM_IMPORT.finditer(text):
        (node,) = ast.parse(f"from {found[1]} import {found[2].strip()}").body
        assert isinstance(node, ast.ImportFrom)
        yield text.count("\n", 0, found.start()) + 1, node


def room(module: str) -> str:
    """The folder a module lies in, or the module itself where that is the package's own folder."""
    return module.split(".", maxsplit=1)[0]


def rings(edges: Iterable[tuple[str, str]]) -> list[set[str]]:
    """Nodes that can reach each other, two or more at a time."""
    after: defaultdict[str, set[str]] = defaultdict(set)
    for source, target in edges:
        after[source].add(target)
    reached = {node: _reached(node, after) for node in list(after)}
    found: list[set[str]] = []
    for node, targets in reached.items():
        ring = {other for other in targets if node in reached.get(other, ())}
        if len(ring) > 1 and ring not in found:
            found.append(ring)
    return found


def _reached(start: str, after: Mapping[str, set[str]]) -> set[str]:
    seen, left = set[str](), [start]
    while left:
        for node in after.get(left.pop(), ()):
            if node not in seen:
                seen.add(node)
                left.append(node)
    return seen


def classes(root: Path, packages: Iterable[str]) -> dict[str, list[Path]]:
    """Where each public class is defined, by its name."""
    found: defaultdict[str, list[Path]] = defaultdict(list)
    for package in packages:
        for path in modules(root, package).values():
            for node in tree(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(path)
    return found


def documented(root: Path, package: str) -> tuple[int, int]:
    """Functions with a docstring, and all."""
    functions = [
        node
        for path in modules(root, package).values()
        for node in statements(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return sum(ast.get_docstring(node) is not None for node in functions), len(functions)


def fullest(root: Path, top: str) -> tuple[int, str]:
    """The most modules in one folder, and which folder that is."""
    counts = Counter(path.parent for path in (root / top).rglob("*.py") if path.name != "__init__.py")
    folder, count = max(counts.items(), key=lambda item: item[1])
    return count, str(folder.relative_to(root))


def lines(root: Path, package: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in modules(root, package).values())


def first_party(root: Path) -> int:
    """Names that the linter must be told are the project's own."""
    lint = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    return len(lint.get("isort", {}).get("known-first-party", ()))


def measured(root: Path) -> list[tuple[str, str]]:
    """Rows of what needs nothing to be run."""
    rows = []
    for top in (*PACKAGES, "tests"):
        count, folder = fullest(root, top)
        rows.append((f"most modules in a folder, {top}", f"{count} ({folder})"))
    for package in PACKAGES:
        folders = {path.name for path in (root / package).iterdir() if path.is_dir()}
        found = rings((room(one.source), room(one.target)) for one in imports(root, package))
        rows.append((f"rooms in a ring of imports, {package}", str(len(set().union(*found) & folders))))
        count = sum(len(ring) for ring in rings((one.source, one.target) for one in imports(root, package)))
        rows.append((f"modules in a ring of imports, {package}", str(count)))
    doubled = [name for name, paths in classes(root, PACKAGES).items() if len(paths) > 1]
    rows.append(("public class names with several meanings", str(len(doubled))))
    for package in PACKAGES:
        documented_, functions = documented(root, package)
        rows.append((f"lines, {package}", f"{lines(root, package):,}"))
        rows.append((f"functions with a docstring, {package}", f"{documented_ / functions:.0%} of {functions:,}"))
    rows.append(("names in known-first-party", str(first_party(root))))
    return rows


# -- a turn, as it runs


def walks(root: Path, python: str) -> dict[str, Walk]:
    """A streamed chat turn by SPLIT and one by LOCAL, through a real proxy over simulated engines."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        out, ports = Path(folder) / "seen.json", dict(zip(("P", "D", "proxy"), free_ports(3), strict=True))
        for role in ("P", "D"):
            argv = [python, "-m", "ppd.servers.sim", "--role", role, "--port", str(ports[role])]
            stack.enter_context(_running(argv, folder))
        argv = [python, "-c", WALKER, str(out), "serve", "--port", str(ports["proxy"]), "--heartbeat-port", "0"]
        argv += ["--mode", "always_local", "--canary-interval-s", "0", "--log-level", "warning"]
        for role in ("P", "D"):
            argv += ["--workers", f"{role}=127.0.0.1:{ports[role]}"]
        proxy = stack.enter_context(_running(argv, folder))
        url = f"http://127.0.0.1:{ports['proxy']}"
        _until(lambda: json.loads(urllib.request.urlopen(f"{url}/ready").read())["split"])
        messages = [{"role": "user", "content": "Which rooms does a turn go through?"}]
        messages += [{"role": "assistant", "content": _ask(url, messages)}]  # what is made once is made by now
        found = {}
        messages = [{"role": "user", "content": "And which way does the next one go?"}]
        for name in ("SPLIT", "LOCAL"):
            out.unlink(missing_ok=True)
            proxy.send_signal(signal.SIGUSR1)
            answer = _ask(url, messages)
            proxy.send_signal(signal.SIGUSR2)
            _until(lambda: json.loads(out.read_text()))
            found[name] = _walk(root, json.loads(out.read_text()))
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
        return found


def _walk(root: Path, seen: list[tuple[str, str]]) -> Walk:
    top = (root / "proxy").resolve()
    calls = [(Path(file).resolve(), name) for file, name in seen]
    inside = [file.relative_to(top) for file, _ in calls if file.is_relative_to(top)]
    rooms = (file.parts[0] if len(file.parts) > 1 else "(flat)" for file in inside)
    files = tuple(dict.fromkeys(str(file) for file in inside))
    return Walk(len(inside), files, tuple(dict.fromkeys(rooms)))


def _ask(url: str, messages: list[dict[str, str]]) -> str:
    body = {"model": "sim", "messages": messages, "stream": True, "max_tokens": 8}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    text = ""
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                choices = json.loads(line.removeprefix(b"data: "))["choices"]
                text += "".join(choice["delta"].get("content") or "" for choice in choices)
    return text


@contextlib.contextmanager
def _running(argv: list[str], folder: str) -> Iterator[subprocess.Popen[bytes]]:
    with (Path(folder) / f"{len(os.listdir(folder))}.log").open("wb") as log:  # noqa: PTH208
        process = subprocess.Popen(argv, stdout=log, stderr=log, cwd=folder)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(LIMIT_S)


def _until(holds: object) -> None:
    """Waits until a question, asked again and again, is answered with yes; TimeoutError."""
    assert callable(holds)
    by_s = time.monotonic() + LIMIT_S
    while True:
        with contextlib.suppress(OSError, ValueError):
            if holds():
                return
        if time.monotonic() > by_s:
            raise TimeoutError(f"nothing within {LIMIT_S:g} s")
        time.sleep(0.05)


@click.command()
@click.option(
    "--root", type=click.Path(path_type=Path, exists=True), default=Path(__file__).parents[2], help="Checkout."
)
@click.option("--python", default=sys.executable, help="Interpreter in which that checkout is installed.")
@click.option("--walk/--no-walk", default=True, help="Whether turns are followed too.")
def main(root: Path, python: str, walk: bool) -> None:
    """Prints the figures of one checkout as a Markdown table."""
    rows = measured(root)
    for name, found in (walks(root, python) if walk else {}).items():
        flat = sum("/" not in file for file in found.files)
        rows.append(
            (f"{name} turn: functions, files, files in no room", f"{found.functions}, {len(found.files)}, {flat}")
        )
        rows.append((f"{name} turn: rooms, by first entry", " ".join(found.rooms)))
    click.echo("| what | figure |\n|---|---|")
    for what, figure in rows:
        click.echo(f"| {what} | {figure} |")


if __name__ == "__main__":
    main()
