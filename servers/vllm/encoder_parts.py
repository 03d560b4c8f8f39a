"""What engines on CPUs need for media, in a folder beside their environment that goes into PYTHONPATH.

* torchvision's Python part, which vLLM's LLaVA imports. The registry's wheel is a CUDA build, and ends where it
  registers what PyTorch's CPU build has no operators for; so the file that does is emptied.
* `servers/ec_redis` as a distribution of its own, with redis-py.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from .cpu_install import Environment, Progress, install_beside
from .tiny_model import ensure_written

EC_REDIS = Path(__file__).parents[1] / "ec_redis"
PARTS = ("torchvision==0.28.0", "redis==8.1.0")


def ensure_parts(environment: Environment, progress: Progress) -> Path:
    """The folder, made if it is not there; InstallError says what failed."""
    sources = [Path(__file__), *sorted(EC_REDIS.glob("*.py")), EC_REDIS / "pyproject.toml"]
    return ensure_written(environment, "encoder-parts", sources, lambda folder: install(environment, folder, progress))


def install(environment: Environment, folder: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory() as scratch:  # building leaves files beside the source
        copy = shutil.copytree(EC_REDIS, Path(scratch) / "ec_redis", ignore=shutil.ignore_patterns("__pycache__"))
        install_beside(environment, folder, [*PARTS, str(copy)], progress)
    (folder / "torchvision" / "_meta_registrations.py").write_text("")
