"""What all programs do where their output cannot be written, or no file can have the name that they are given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ppd.servers.cli.main import main

FULL = Path("/dev/full")


LONG = "n" * 300  # no file can have this name, and asking whether one has it is an error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (f"serve --check --receipt-log {LONG}", ": must be a file that can be written"),
        (f"serve --check --profile {LONG}", f"profile = '{LONG}': must be "),
        (f"sim --profile {LONG}", f"profile = '{LONG}': must be "),
        (f"keys curve x --dir {LONG}", f"{LONG}/x.key: File name too long"),
        (
            f"sidecar --engine http://127.0.0.1:1 --listen 127.0.0.1:1 --allow-prefill 10.0.0.1:80,{LONG}",
            ": must be address ranges",
        ),
    ],
)
def test_a_name_that_no_file_can_have_is_one_line(arguments: str, said: str) -> None:
    result = CliRunner().invoke(main, arguments.split())
    assert result.exit_code in (1, 2)
    assert said in result.stderr


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
