"""A client's first lines, as the README has them, sent to a fleet."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parents[3] / "README.md").read_text()
LINES = README.partition("**A client's first lines**")[2].partition("\n## ")[0]
(CURL,) = re.findall(r"```\n(curl .+?)```", LINES, re.DOTALL)
PYTHON = {
    re.findall(r"from (\w+) import", block)[0]: block for block in re.findall(r"```python\n(.+?)```", LINES, re.DOTALL)
}


async def said(program: str, *argv: str) -> str:
    process = await asyncio.create_subprocess_exec(
        program, *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.parametrize("client", ["curl", *PYTHON])
async def test_the_first_lines_of_a_client_get_an_answer(start_fleet: Any, client: str) -> None:
    if client != "curl" and importlib.util.find_spec(client) is None:
        pytest.skip(f"{client} is not installed")
    async with start_fleet("P1 D1") as fleet:
        if client == "curl":
            text = await said("sh", "-c", CURL.replace("http://127.0.0.1:10001", fleet.base_url))
            assert '"finish_reason":"length"' in text.replace(": ", ":")
        else:
            text = await said(sys.executable, "-c", PYTHON[client].replace("http://127.0.0.1:10001", fleet.base_url))
            assert text.strip()
