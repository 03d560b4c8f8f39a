"""Builds the mock backend and the load generator. They are in C: in Python they would be slower than the proxy."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ppd.proxy.errors import ConfigError, PPDError
from ppd.servers.vllm.cpu_install import cache_root

SOURCES = Path(__file__).with_name("native")
_FLAGS = ("-O2", "-Wall", "-Wextra")


@dataclass(frozen=True, slots=True)
class Tools:
    mock: Path
    load: Path


def cache_folder() -> Path:
    return cache_root(os.environ) / "overhead"


def version(sources: Path = SOURCES) -> str:
    digest = hashlib.sha256("\0".join(_FLAGS).encode())
    for path in sorted(sources.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def build(cache: Path) -> Tools:
    """Compiles what is not there yet; ConfigError without a compiler."""
    folder = cache / f"native-{version()}"
    return Tools(*(_compile(SOURCES / f"{name}.c", folder / name) for name in ("mock", "load")))


def _compile(source: Path, program: Path) -> Path:
    if program.exists():
        return program
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise ConfigError("gcc: not found; the mock backend and the load generator are C, so a C compiler is needed")
    program.parent.mkdir(parents=True, exist_ok=True)
    unfinished = program.with_suffix(f".{os.getpid()}")
    argv = [compiler, *_FLAGS, "-o", str(unfinished), str(source)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PPDError(f"{source.name} does not compile: {done.stderr.strip()}")
    unfinished.replace(program)  # atomic: several may build at the same time
    return program
