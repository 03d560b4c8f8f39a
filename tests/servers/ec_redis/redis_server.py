"""A real redis-server, behind a socket in a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

UNPACKED = Path(__file__).parents[3] / ".venv/redis/usr"


class RedisServer:
    """`with` starts and stops it; it may be killed and started again, and has then forgotten all."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "redis.sock"
        self.url = f"unix://{self.path}"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        libraries = os.pathsep.join(str(one) for one in UNPACKED.glob("lib/*-linux-gnu"))
        self._process = subprocess.Popen(
            [
                find_server(),
                "--port",
                "0",
                "--unixsocket",
                str(self.path),
                "--save",
                "",
                "--dir",
                str(self.path.parent),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"LD_LIBRARY_PATH": libraries},
        )
        assert self._process.stdout is not None
        said = next((line for line in self._process.stdout if "eady to accept connections" in line), None)
        assert said is not None, "redis-server ended"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def find_server() -> str:
    own = UNPACKED / "bin/redis-server"
    found = shutil.which(os.environ.get("PPD_REDIS_SERVER", "redis-server")) or (str(own) if own.exists() else None)
    if found is None:
        assert "CI" not in os.environ, "make redis"
        pytest.skip("no redis-server: `make redis` unpacks Debian's; PPD_REDIS_SERVER names another")
    return found
