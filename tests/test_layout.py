"""The structure that docs/architecture.md promises: rooms in order, arrows that point one way, files of one noun."""

from __future__ import annotations

import ast
import gc
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.small.structure import Import, classes, compiled, imports, modules, rings, statements, tree

ROOT = Path(__file__).parents[1]
ALONE = "pytest.mark." + "alone"
ORDER = ("proxy", "servers", "offline", "benchmarks")  # each may import those before it

# Top to bottom: a room, or a module that lies beside rooms, imports only what stands below it.
ROOMS = {
    "proxy": (
        *(
            "cli",
            "downstream",
            "gateway",
            "app",
            "assembly",
            "peers",
            "passthrough",
            "routing",
            "encoders",
            "tokenizer",
            "bodies",
            "health",
            "admission",
            "settings",
        ),
        *("discovery", "policy", "connectors", "upstream", "openai", "media", "sessions", "readback"),
        *(
            "kv_events",
            "telemetry",
            "decision_table",
            "beliefs",
            "laws",
            "fleet",
            "runtime",
            "config",
            "errors",
            "failures",
            "leg_moves",
            "plane",
        ),
    ),
    "servers": ("__main__", "cli", "sidecar", "agent", "fleet", "vllm", "ec_redis", "sim"),
    "servers/sim": ("__main__", "command", "launch", "api", "engine", "encoding", "protocols", "templates", "core"),
    "offline": (
        *(
            "cli",
            "advice",
            "report",
            "bench",
            "calibration",
            "backends",
            "sweep",
            "goodput",
            "replay",
            "simulation",
            "load",
            "tables",
        ),
        *("traces", "experiment"),
    ),
    "offline/report": ("write", "sections", "paper", "figures", "analysis", "page"),
    "benchmarks": (
        "pages",
        "turns",
        "small",
        "policies",
        "recognition",
        "eviction",
        "overhead",
        "interference",
        "encoders",
        "network",
        "soak",
    ),
}

# Public class names that mean two things in one package. Only to be shortened.
DOUBLED: dict[str, frozenset[str]] = {"proxy": frozenset(), "servers": frozenset(), "offline": frozenset()}

MODULES = {"tests": 20}  # in one folder
MODULES_ELSEWHERE = 14
MODULES_BESIDE_ROOMS = 6  # in `proxy` itself
LINES, FUNCTION_LINES = 400, 50


@pytest.fixture(autouse=True, scope="module")
def _uncollected() -> Iterator[None]:
    """Files in parts are millions of objects that stay: to walk them again and again takes as long as all else here."""
    gc.disable()
    yield
    tree.cache_clear()
    statements.cache_clear()
    gc.enable()


def sources(*tops: str) -> Iterator[Path]:
    return (path for top in tops for path in sorted((ROOT / top).rglob("*.py")))


def compiled_sources() -> Iterator[Path]:
    return (path for top in ORDER for _, path in compiled(ROOT, top))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def within(folder: str) -> Iterator[tuple[str, str, Import]]:
    """Imports between the rooms of a folder, and what comes from or goes to the folder's own `__init__` as ""."""
    package, *inner = folder.split("/")
    prefix = "".join(f"{part}." for part in inner)
    for one in imports(ROOT, package):
        if (one.source + ".").startswith(prefix) and (one.target + ".").startswith(prefix):
            source, target = (module.removeprefix(prefix).split(".")[0] for module in (one.source, one.target))
            if "." not in one.source.removeprefix(prefix) and one.path.name == "__init__.py":
                source = source if source in ROOMS[folder] else ""
            yield source, target, one


def test_packages_import_one_way_and_through_ppd() -> None:
    wrong = []
    for path in sources(*ORDER):
        later = ORDER[ORDER.index(path.relative_to(ROOT).parts[0]) + 1 :]
        for node in statements(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                if name.split(".")[0] in ("proxy", "servers", "offline"):
                    wrong.append(f"{name_of(path)}: import {name} as ppd.{name}")
                if any(f"{name}.".startswith((f"ppd.{top}.", f"{top}.")) for top in later):
                    wrong.append(f"{name_of(path)}: imports {name}, which stands above it")
    assert wrong == []


@pytest.mark.parametrize("folder", ROOMS)
def test_rooms_import_downwards_only(folder: str) -> None:
    order = {room: place for place, room in enumerate(ROOMS[folder])}
    unknown = {path.name.removesuffix(".py") for path in (ROOT / folder).iterdir() if path.suffix == ".py"}
    unknown |= {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
    assert unknown - order.keys() == {"__init__"}, "each room and module has its place in the order"
    upwards = [
        f"{name_of(one.path)}:{one.line}: {source} imports {target}, which stands above it"
        for source, target, one in within(folder)
        if source and target and source != target and order[target] < order[source]
    ]
    assert upwards == []


@pytest.mark.parametrize("package", ORDER)
def test_no_modules_import_each_other_in_a_ring(package: str) -> None:
    assert rings((one.source, one.target) for one in imports(ROOT, package)) == []


def test_every_package_folder_ships() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        "ppd." + ".".join(init.parent.relative_to(ROOT).parts)
        for top in ("proxy", "servers", "offline")
        for init in (ROOT / top).rglob("__init__.py")
    }
    assert folders | {"ppd.tables"} == set(settings["packages"])


def test_every_compiled_module_is_built_and_typed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    built = {entry["name"]: entry for entry in settings["ext-modules"]}
    found = {path: [path.with_suffix(".pxd")] for path in compiled_sources() if path.suffix == ".pyx"}
    typed = {path.with_suffix(".py"): path for path in compiled_sources() if path.with_suffix(".py").is_file()}
    found |= {path: [pxd] for path, pxd in typed.items()}
    for one in imports(ROOT, "proxy"):
        if one.path in found:
            found[one.path].append(ROOT / "proxy" / f"{one.target.replace('.', '/')}.pxd")
    assert built.keys() == {"ppd." + name_of(path.with_suffix("")).replace("/", ".") for path in found}
    for path, cimported in found.items():
        entry = built["ppd." + name_of(path.with_suffix("")).replace("/", ".")]
        assert entry["sources"][0] == name_of(path)
        assert entry["optional"], "PPD installs without a C compiler too"
        assert "typings" in entry["include-dirs"], "where its cimports are looked for"
        needed = {name_of(pxd) for pxd in cimported if pxd.is_file()}
        assert needed <= set(entry.get("depends", ())), "what is cimported has it built again"
        assert path in typed or path.with_suffix(".pyi").is_file()


def test_what_was_built_is_no_older_than_its_source() -> None:
    """Else tests run what was there before an edit, above all where the source is Python: `make .venv/.ready`."""
    for source in compiled_sources():
        module = source.with_suffix(".py") if source.with_suffix(".py").is_file() else source
        for built in module.parent.glob(f"{module.stem}.*.so"):
            assert built.stat().st_mtime >= max(one.stat().st_mtime for one in (module, source)), built.name


def test_every_folder_of_modules_is_a_room_with_its_sentence() -> None:
    plugins = {ROOT / "servers/vllm/lowcpu", ROOT / "servers/vllm/mooncake_cpu"}  # of vLLM, installed by themselves
    folders = {path.parent for path in sources(*ORDER)} - plugins
    silent = [
        name_of(folder)
        for folder in sorted(folders)
        if not (folder / "__init__.py").is_file() or not ast.get_docstring(tree(folder / "__init__.py"))
    ]
    assert silent == []


def test_folders_stay_small_enough_to_be_read_as_a_list() -> None:
    found = {}
    for folder in {path.parent for path in sources(*ORDER, "tests")}:
        named = {path.stem for pattern in ("*.py", "*.p[yx][xd]") for path in folder.glob(pattern)}
        count = len(named - {"__init__"})
        top = folder.relative_to(ROOT).parts[0]
        if count > (MODULES_BESIDE_ROOMS if folder == ROOT / "proxy" else MODULES.get(top, MODULES_ELSEWHERE)):
            found[name_of(folder)] = count
    assert found == {}


def test_files_and_functions_stay_one_noun_long() -> None:
    long = []
    for path in (*sources(*ORDER, "tests"), *compiled_sources()):
        text = path.read_text()
        if (lines := len(text.splitlines())) > LINES:
            long.append(f"{name_of(path)}: {lines} lines")
        for name, line, lines in functions(path):
            if lines > FUNCTION_LINES:
                long.append(f"{name_of(path)}:{line}: {name} has {lines} lines")
    assert long == []


def functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Each with its first line and how many it has."""
    if path.suffix == ".py":
        for node in statements(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, node.lineno, (node.end_lineno or 0) - node.lineno + 1
        return
    text = path.read_text()
    # Cython's: its head, then all lines that are empty or further to the right.
    head = r"^( *)(?:async )?(?:def|cp?def (?!class|enum|extern|struct|union)[^=\n]*?) *\b(\w+)\(.*\n"
    for found in re.finditer(head + r"(?:(?:\1[ )].*)?\n)*", text, re.MULTILINE):
        yield found[2], text.count("\n", 0, found.start()) + 1, len(found[0].rstrip().splitlines())


@pytest.mark.parametrize("package", ORDER)
def test_a_public_class_name_has_one_meaning_in_a_package(package: str) -> None:
    doubled = {name for name, paths in classes(ROOT, [package]).items() if len(paths) > 1}
    assert doubled == DOUBLED.get(package, frozenset())


def test_the_architecture_page_lists_the_rooms_as_they_are() -> None:
    """In the order of `ROOMS`, each with the sentence of its `__init__`, or of its module."""
    page = (ROOT / "docs/architecture.md").read_text()
    for folder in ("proxy", "servers", "offline", "benchmarks"):
        listed = re.search(rf"<!-- rooms of {folder} -->\n(.*?)\n\n", page, re.DOTALL)
        assert listed is not None, f"the page has a table of {folder}"
        rows = re.findall(r"^\| `([a-z_]+)(?:/|\.py)` \| (.*) \|$", listed[1], re.MULTILINE)
        known = modules(ROOT, folder)
        sentences = {
            room: " ".join((ast.get_docstring(tree(known[room])) or "").split("\n\n")[0].split())
            for room in ROOMS[folder]
            if room != "__main__"
        }
        assert rows == list(sentences.items())


def test_tests_that_run_alone_are_where_the_makefile_looks_for_them() -> None:
    """It collects no other folder for them."""
    marked = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py") if ALONE in path.read_text()}
    assert marked, "somebody has it"
    assert {path.parts[:2] for path in marked} == {("tests", "e2e")}
