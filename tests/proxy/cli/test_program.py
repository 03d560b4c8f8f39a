"""What all programs do where their output cannot go anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.is_char_device(), reason="there is no full device here")
@pytest.mark.parametrize("arguments", ["--help", "--version", "keys --help", "table list", "keys new --name a"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_standard_output_is_one_line(arguments: str, unbuffered: str) -> None:
    program = [sys.executable, "-m", "ppd.servers", *arguments.split()]
    with FULL.open("wb") as full:
        ended = subprocess.run(
            program,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    assert ended.returncode == 1
    assert ended.stderr.endswith("Error: the output cannot be written: No space left on device\n")
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr
