"""The program, in a process of its own."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp.client_exceptions import ClientConnectorError

from ppd.servers.fleet.ports import free_ports
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.launch import running_engine
from tests.servers.sidecar.site import BODY, CHAT


@pytest.mark.slow
async def test_the_program_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url, receipts = f"http://127.0.0.1:{port}", tmp_path / "receipts.jsonl"
    async with running_engine(SimConfig()) as engine, aiohttp.ClientSession() as session:
        argv = ("sidecar", "--engine", f"http://{engine.address}", "--listen", f"127.0.0.1:{port}")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ppd.servers", *argv, "--receipt-log", str(receipts)),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(60):
                while not await answers(session, f"{url}/health"):
                    await asyncio.sleep(0.05)
                async with session.post(url + CHAT, json=BODY, headers={"x-prefiller-host-port": "p:1"}) as response:
                    assert response.status == 403, "no list, so no P"
                async with session.post(url + CHAT, json=BODY) as response:
                    assert response.status == 200
                process.send_signal(signal.SIGTERM)
                _, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
    assert process.returncode == 0, err.decode()
    assert b"no list, so none is allowed" in err and b"Traceback" not in err
    assert [b'"outcome":"completed"' in line for line in receipts.read_bytes().splitlines()] == [False, True]


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except ClientConnectorError:
        return False
