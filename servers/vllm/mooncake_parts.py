"""What engines on CPUs need for Mooncake over TCP, in a folder beside their environment.

* Mooncake's transfer engine, in its build without CUDA, and the libraries of Debian that it is linked with. They are
  unpacked, not installed: that needs no root, and nothing of the system changes.
* `mooncake_cpu`, without which vLLM's connector ends where there is no accelerator.

`environment_of` says which variables lead an engine to them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from .cpu_install import Environment, InstallError, Progress, install_beside, run_step
from .tiny_model import ensure_written

ENGINE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
DEBIAN = ("libibverbs1", "librdmacm1", "libnl-3-200", "libnl-route-3-200", "libnuma1", "libjsoncpp25")
PLUGIN = Path(__file__).with_name("mooncake_cpu")
LIBRARIES = ("debian/usr/lib/x86_64-linux-gnu", "debian/lib/x86_64-linux-gnu")


def ensure_mooncake(environment: Environment, progress: Progress) -> Path:
    """The folder, made if it is not there; InstallError says what failed."""
    sources = [Path(__file__), *sorted(PLUGIN.glob("*.py")), PLUGIN / "pyproject.toml"]
    return ensure_written(environment, "mooncake-parts", sources, lambda folder: install(environment, folder, progress))


def environment_of(parts: Path) -> dict[str, str]:
    """Variables of an engine; `parts`: what `ensure_mooncake` returned."""
    libraries = os.pathsep.join(str(parts / folder) for folder in LIBRARIES)
    return {"PYTHONPATH": str(parts), "LD_LIBRARY_PATH": libraries}


def install(environment: Environment, folder: Path, progress: Progress) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise InstallError(f"Mooncake on CPUs needs {', '.join(DEBIAN)}: unpacked from Debian's packages, by apt-get")
    with tempfile.TemporaryDirectory() as scratch:
        plugin = shutil.copytree(PLUGIN, Path(scratch) / "plugin", ignore=shutil.ignore_patterns("__pycache__"))
        install_beside(environment, folder, [ENGINE, str(plugin)], progress)
        packages = Path(scratch) / "debian"
        packages.mkdir()
        if os.geteuid() == 0:
            run_step(["apt-get", "update", "-qq"], progress)
        run_step(["apt-get", "download", "-qq", *DEBIAN], progress, folder=packages)
        for package in sorted(packages.glob("*.deb")):
            run_step(["dpkg", "-x", str(package), str(folder / "debian")], progress)
