"""The programs as users run them: processes of their own, announced by agents, ended without leftovers."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

PORT, HEARTBEATS, OFFSET = 10901, 30901, 900
FLAGS = ("--port", str(PORT), "--heartbeat-port", str(HEARTBEATS), "--port-offset", str(OFFSET))


async def start(*argv: str, cwd: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "ppd.servers", *argv),
        cwd=cwd,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


def is_free(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return attempt.connect_ex(("127.0.0.1", port)) != 0


async def test_the_demo_plays_three_turns_and_leaves_nothing_behind(tmp_path: Path) -> None:
    process = await start("demo", "--once", *FLAGS, cwd=tmp_path)
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, err.decode()
    turns = [line.split() for line in out.decode().splitlines() if line[:1] in "123" and "ms" in line]
    assert [turn[:3] for turn in turns] == [
        ["1", "SPLIT", "first_turn"],
        ["2", "LOCAL", "table_local"],
        ["3", "LOCAL", "table_local"],
    ]
    assert is_free(PORT) and is_free(8100 + OFFSET) and is_free(8200 + OFFSET)


async def test_up_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    process = await start("up", "-P", "1", "-D", "1", "-R", "0", "--log-dir", "logs", *FLAGS, cwd=tmp_path)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        while b"OpenAI base URL" not in await process.stdout.readline():
            assert process.returncode is None
    body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{PORT}/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200
        assert response.headers["X-PPD-Route"] == "SPLIT"
    process.send_signal(signal.SIGTERM)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    assert is_free(PORT) and is_free(8100 + OFFSET) and is_free(8200 + OFFSET)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("serve", "--w-ttft", "-1"), "w_ttft"),
        (("serve", "--mode", "both"), "always_local"),
        (("serve", "--table", "none"), "2P_2D"),
        (("serve", "--config", "missing.toml"), "missing.toml"),
        (("serve", "--workers", "X=1"), "ROLE=host:port"),
        (("serve", "--port", str(PORT + 1), "--heartbeat-host", "127.0.0.256"), "heartbeat_open = true"),
        (("serve", "--port", str(PORT + 1), "--heartbeat-host", "*.", "--heartbeat-open", "true"), "heartbeat_port"),
        (("agent", "--role", "Q"), "'P', 'D', 'R'"),
        (("agent", "--role", "P", "--attach", "nowhere"), "http://host:port"),
        (("agent", "--role", "P", "--engine", "vllm"), "model"),
    ],
)
async def test_a_wrong_flag_is_one_clear_line(tmp_path: Path, argv: tuple[str, ...], said: str) -> None:
    process = await start(*argv, cwd=tmp_path)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode not in (0, None)
    assert said in err.decode()
    assert "Traceback" not in err.decode()
