"""Client libraries as people install them, at pinned versions, each in an environment of its own made by uv or npm.

A client is a program beside this test, whose head names its packages (PEP 723, or a line of what npm installs). They
are installed once per machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import uv

from ppd.servers.vllm.cpu_install import cache_root
from tests.support.credentials import client, key_of, write_keys

PROGRAMS = Path(__file__).with_name("programs")
INSTALLED_S = 540.0
WORDS = ["And then? Please say it in a few more words.", "And after that, what was the end of it?"]
OPENING = [{"role": "user", "content": "A first message that is long enough to fill a few blocks of KV. " * 3}]
PACKAGE = re.compile(r'"([\w\-\[\],@/]+(?:==|@)[\d.]+)"')
LIMITED = {"requests_per_minute": 1}


async def run(program: str, asked: dict[str, Any]) -> Any:
    """What the program prints, as JSON; its own words if it fails."""
    process = await asyncio.create_subprocess_exec(
        *await asyncio.to_thread(command, PROGRAMS / program),
        json.dumps(asked),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), INSTALLED_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    return json.loads(out.splitlines()[-1])


def command(program: Path) -> Sequence[str]:
    """Installs what the program needs, if that is npm's."""
    if program.suffix == ".py":
        return uv.find_uv_bin(), "run", "--quiet", "--no-project", "--python", sys.executable, "--script", str(program)
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("needs node and npm")
    text = program.read_text()
    packages = PACKAGE.findall(text.splitlines()[0])
    folder = cache_root(os.environ) / "npm" / "-".join([program.stem, *packages]).replace("/", "-")
    if not (folder / "package.json").is_file():  # which npm writes at last
        folder.mkdir(parents=True, exist_ok=True)
        install = (npm, "install", "--silent", "--prefix", str(folder), *packages)
        subprocess.run(install, check=True, timeout=INSTALLED_S)
    (folder / program.name).write_text(text)  # it finds its packages beside itself
    return node, str(folder / program.name)


@pytest.mark.parametrize(
    ("program", "conversations", "unserved"),
    [
        ("openai_client.py", ("chat", "responses"), "InternalServerError"),
        ("anthropic_client.py", ("chat",), "InternalServerError"),
        ("litellm_client.py", ("chat", "messages"), "ServiceUnavailableError"),
        ("langchain_client.py", ("chat",), "InternalServerError"),
    ],
)
async def test_a_client_library_has_its_conversations_and_its_errors(
    start_fleet: Any, tmp_path: Path, program: str, conversations: tuple[str, ...], unserved: str
) -> None:
    keys = write_keys(tmp_path / "keys.toml", client("one"), client("limited", **LIMITED))
    engine = {"stores_responses": True}
    async with start_fleet("P1 D1", keys_file=keys, engine=engine) as fleet, start_fleet("") as empty:
        await fleet.post("/tokenize", {"model": "sim", "prompt": "x"}, {"X-Api-Key": key_of("limited")})
        errors = {
            "AuthenticationError": {"key": "guess"},
            "NotFoundError": {"model": "other"},
            "BadRequestError": {"max_tokens": 10**6},
            "RateLimitError": {"key": key_of("limited")},
            unserved: {"url": empty.base_url},
        }
        asked = {"url": fleet.base_url, "key": key_of("one"), "opening": OPENING, "words": WORDS, "errors": errors}
        seen = await run(program, asked)
        turns = [one for one in reversed(fleet.proxy.state.receipts.newest(100)) if one.outcome == "completed"]

    for name, kinds in seen["errors"].items():
        assert name in (kinds or []), (name, kinds)
    assert [turn.route for turn in turns] == ["SPLIT", "LOCAL"] * len(conversations)
    for conversation in conversations:
        assert len(seen[conversation]["texts"]) == len(WORDS)
    for turn in turns:
        assert (turn.stream, turn.status, turn.client) == (True, 200, "one")
        assert turn.completion_tokens
        assert turn.route == "SPLIT" or (turn.cached_tokens or 0) > len(WORDS[0]), "the whole first turn is reused"
    if "cached" in seen["chat"]:
        assert seen["chat"]["cached"] == [turn.cached_tokens for turn in turns[:2]]
    if program == "anthropic_client.py":
        assert seen["errors"]["RateLimitError"][-2:] == ["error", "rate_limit_error"]
        assert seen["count"] > 0
    if program == "openai_client.py":
        assert seen["responses"]["read"]
