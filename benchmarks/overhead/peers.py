"""The other routers, each in a virtual environment of its own, so that none changes PPD's dependencies.

The ordinary `pip install` of each is small: none of them needs PyTorch or an engine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from ppd.proxy.errors import ConfigError, PPDError

PEERS = ("vllm-router", "sglang-router", "smg")  # the names on PyPI, and of their commands
_TAIL_LINES = 5


class PeerError(PPDError):
    """A peer can't be installed or started; the message ends with the last lines of its output."""


def program(cache: Path, peer: str) -> Path:
    return cache / "peers" / peer / "bin" / peer


def version(cache: Path, peer: str) -> str:
    """PeerError names the command that installs the peer."""
    found = sorted((cache / "peers" / peer).glob(f"lib/python*/site-packages/{peer.replace('-', '_')}-*.dist-info"))
    if not found or not program(cache, peer).exists():
        raise PeerError(f"{peer} is not installed: python -m benchmarks.overhead install")
    return found[-1].name.removesuffix(".dist-info").rpartition("-")[2]


def install(cache: Path, peer: str) -> str:
    """Replaces what was installed by the newest release; returns its version."""
    if peer not in PEERS:
        raise ConfigError(f"peer {peer!r}: must be one of {', '.join(PEERS)}")
    folder = cache / "peers" / peer
    shutil.rmtree(folder, ignore_errors=True)
    _run(peer, sys.executable, "-m", "venv", str(folder))
    _run(peer, str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", peer)
    return version(cache, peer)


def _run(peer: str, *argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PeerError(f"{peer} can't be installed: {last_lines(done.stdout + done.stderr)}")


def last_lines(text: str) -> str:
    return " / ".join(line.strip() for line in text.strip().splitlines()[-_TAIL_LINES:])
