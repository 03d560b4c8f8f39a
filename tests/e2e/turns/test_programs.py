"""The programs as users run them: processes of their own, announced by agents, ended without leftovers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from random import SystemRandom
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner

from ppd.proxy.fleet.worker import Role
from ppd.servers.cli.main import main
from ppd.servers.fleet.fleet import FleetSpec, LocalFleet
from ppd.servers.fleet.ports import FIRST_PORT, FIRST_SIDECAR, free_ports, is_free
from ppd.servers.fleet.prepare import Prepared
from ppd.servers.fleet.process import EngineFailed
from tests.e2e.encoders.test_encoders import picture

FIRST_ENVOY = 8900  # without an offset, as those of a fleet's workers


def own_offset() -> int:
    """To ports that neither `free_ports` nor the kernel gives to anybody, beyond those where fleets look for free ones.

    One of a hundred: another run of the tests on this machine, whose fleets start meanwhile, has another.
    """
    offsets = [thousands + tens for thousands in range(2_000, 12_000, 1_000) for tens in range(0, 100, 10)]
    ports = {first + place for first in (*FIRST_PORT.values(), FIRST_SIDECAR, FIRST_ENVOY) for place in range(3)}
    return next(one for one in SystemRandom().sample(offsets, 100) if all(is_free(port + one) for port in ports))


PORT, HEARTBEATS = free_ports(2)
OFFSET = own_offset()
FLAGS = ("--port", str(PORT), "--heartbeat-port", str(HEARTBEATS), "--port-offset", str(OFFSET))


def left_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def start(*argv: str, cwd: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *("env", "--default-signal=HUP,INT"),  # whoever runs the tests may ignore them, as under nohup
        sys.executable,
        *("-m", "ppd.servers", *argv),
        cwd=cwd,
        env=os.environ | {"TMPDIR": str(cwd)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


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
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "said_first"),
    [(signal.SIGTERM, ""), (signal.SIGINT, "ready after"), (signal.SIGTERM, "stays up"), (signal.SIGHUP, "stays up")],
)
async def test_a_demo_that_is_ended_removes_its_folder(tmp_path: Path, number: signal.Signals, said_first: str) -> None:
    process = await start("demo", "-P", "0", "-D", "0", *FLAGS, cwd=tmp_path)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        while not any(logs for _, _, logs in os.walk(tmp_path)):
            await asyncio.sleep(0.01)
        while said_first and said_first.encode() not in (line := await process.stdout.readline()):
            assert line, "it goes on"
    try:
        process.send_signal(number)
        _, err = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()  # its own programs end with it
    assert (process.returncode, err) == (0, b"")
    assert left_in(tmp_path) == []
    assert is_free(PORT) and is_free(8300 + OFFSET)


async def test_a_demo_whose_conversation_fails_says_why_in_one_line(tmp_path: Path) -> None:
    process = await start("demo", "-P", "0", "-D", "0", *FLAGS, "--", "--max-model-len", "300", cwd=tmp_path)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert "1     REPLICA" in out.decode()
    assert err.decode().startswith("Error: a turn failed: Error code: 400 - This model's maximum context length is 300")
    assert len(err.decode().splitlines()) == 1
    assert left_in(tmp_path) == []


async def test_a_demo_whose_engine_fails_says_why_and_removes_its_folder(tmp_path: Path) -> None:
    process = await start("demo", *FLAGS, "--", "--block-size", "none", cwd=tmp_path)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert "'none' is not a valid integer" in err.decode()
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("command", ["demo", "up"])
@pytest.mark.parametrize(
    ("port", "said"),
    [
        (PORT, f"port = {PORT}: must be a free port on 127.0.0.1 (Address already in use); --port takes another"),
        (HEARTBEATS, f"heartbeat_port = {HEARTBEATS}: must be a free port"),
        (8100 + OFFSET, f"port_offset = {OFFSET}: must leave the workers free ports"),
    ],
    ids=["port", "heartbeat_port", "port_offset"],  # the same in each of pytest's processes
)
async def test_a_port_that_is_taken_is_one_line_before_anything_starts(
    tmp_path: Path, command: str, port: int, said: str
) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        process = await start(command, *FLAGS, cwd=tmp_path)
        out, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, out) == (1, b"")
    assert err.decode().startswith(f"Error: {said}") and err.count(b"\n") == 1
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("flag", ["port", "heartbeat-port", "picker-port"])
async def test_a_proxy_names_its_address_only_once_all_its_ports_are_open(
    tmp_path: Path, flag: str, processes: str
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = str(other.getsockname()[1])
        free = ("--port", str(PORT), "--heartbeat-port", str(HEARTBEATS))
        process = await start("serve", *free, f"--{flag}", taken, "--processes", processes, cwd=tmp_path)
        out, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, out) == (1, b"")
    key = flag.replace("-", "_")
    assert err.decode().startswith(f"Error: {key} = {taken}: must be a free port") and err.count(b"\n") == 1


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_a_proxys_address_is_named_once_and_takes_clients_then(tmp_path: Path, processes: str) -> None:
    ports = ("--port", str(PORT), "--heartbeat-port", str(HEARTBEATS))
    process = await start("serve", *ports, "--processes", processes, cwd=tmp_path)
    assert process.stderr is not None
    named = b"http://127.0.0.1:%d;" % PORT
    async with asyncio.timeout(60):
        said = await process.stderr.readuntil(named)
        assert not is_free(PORT)
        process.terminate()
        said += await process.stderr.read()
        await process.wait()
    assert (process.returncode, said.count(named)) == (0, 1), said.decode()


async def test_another_proxy_on_the_port_is_never_taken_for_the_fleets_own(tmp_path: Path) -> None:
    """One that came between the look at the port and the start, and that has as many workers."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text='ppd_workers{role="R",state="up"} 1.0\n')

    async def anything(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "X-Admin-Key: wrong"}}, status=401)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_route("*", "/{path:.*}", anything)
    async with TestServer(app, port=PORT):
        spec = FleetSpec(
            engine="sim",
            workers={Role.REPLICA: 1},
            prepared=Prepared(model="", name="sim"),
            port=PORT,
            heartbeat_port=HEARTBEATS,
            port_offset=OFFSET,
            log_dir=tmp_path,
        )
        async with LocalFleet(spec) as fleet:
            with pytest.raises(EngineFailed, match=f"proxy ended with 1(.|\\n)*port = {PORT}: must be a free port"):
                await fleet.wait_ready(60)


async def say(
    session: aiohttp.ClientSession, url: str, admin: str, messages: list[Any], content: Any
) -> dict[str, Any]:
    """The receipt of a conversation's next turn; `messages` grow."""
    messages.append({"role": "user", "content": content})
    body = {"model": "sim", "messages": messages, "max_tokens": 8}
    async with session.post(f"{url}/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        messages.append((await answer.json())["choices"][0]["message"])
    receipt: dict[str, Any] = {}
    while receipt.get("outcome") != "completed":
        asked = f"{admin}/requests/{answer.headers['x-request-id']}"
        async with session.get(asked, headers={"X-Admin-Key": "operator"}) as found:
            receipt = await found.json()
        await asyncio.sleep(0.01)
    return receipt


PD = ("-P", "1", "-D", "1", "-R", "0")
IMAGE = {"type": "image_url", "image_url": {"url": picture(1)}}


@pytest.mark.parametrize(
    ("fleet", "content", "items"),
    [
        (PD, "hi", None),
        ((*PD, "--connector", "sglang"), "hi", None),
        (("--topology", "1E_1P_1D", "--config", "ppd.toml"), [IMAGE], ["image: encoded"]),
    ],
    ids=["PD", "sglang", "E"],
)
async def test_up_serves_until_it_is_told_to_stop(
    tmp_path: Path, fleet: tuple[str, ...], content: Any, items: list[str] | None
) -> None:
    (tmp_path / "ppd.toml").write_text('encoder = "always"\n')
    flags = ("--log-dir", "logs", "--admin-key", "operator", *FLAGS)
    process = await start("up", *fleet, *flags, cwd=tmp_path)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            while b"OpenAI base URL" not in (line := await process.stdout.readline()):
                assert line, "it goes on"
            receipt = await say(session, line.decode().split()[-1], f"http://127.0.0.1:{PORT}/admin", [], content)
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = await asyncio.wait_for(process.communicate(), 60)
    assert (receipt["route"], [leg["kind"] for leg in receipt["legs"]]) == ("SPLIT", ["prefill", "decode"])
    assert (receipt["encoder"] and receipt["encoder"]["items"]) == items
    assert process.returncode == 0, err.decode()
    assert is_free(PORT) and is_free(8100 + OFFSET) and is_free(8200 + OFFSET)


async def test_up_behind_envoy_splits_stays_and_ends_whole(tmp_path: Path) -> None:
    port = FIRST_ENVOY + OFFSET
    flags = ("--gateway", "envoy", "--admin-key", "operator", *FLAGS, "--port", str(port))
    process = await start("up", "-P", "1", "-D", "1", "-R", "0", *flags, cwd=tmp_path)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        while b"OpenAI base URL" not in (line := await process.stdout.readline()):
            assert line, "it goes on"
    url, messages, turns = line.decode().split()[-1], list[dict[str, str]](), list[tuple[str, bool]]()
    admin = f"http://127.0.0.1:{port + 1}/admin"
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while (await say(session, url, admin, list(messages), "Are you there?"))["counts_evidence"] != "report":
                pass  # a sidecar's first report may come too late for its turn; from then on it is waited for
            for turn in range(3):
                receipt = await say(session, url, admin, messages, f"{turn}: tell me of the sea, at some length. " * 10)
                assert receipt["counts_evidence"] == "report"
                turns.append((receipt["route"], receipt["cached_tokens"] > 0))
    finally:
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 60)
    assert turns == [("SPLIT", False), ("LOCAL", True), ("LOCAL", True)]
    assert process.returncode == 0, err.decode()
    assert all(map(is_free, (port, port + 1, port + 2, 8100 + OFFSET, 8200 + OFFSET, 8500 + OFFSET)))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ("up", "--gateway", "envoy", "--connector", "mooncake", *FLAGS),
            "a sidecar asks nobody",
        ),
        (("serve", "--w-ttft", "-1"), "w_ttft"),
        (("serve", "--mode", "both"), "always_local"),
        (("serve", "--table", "none"), "2P_2D"),
        (("serve", "--config", "missing.toml"), "missing.toml"),
        (("serve", "--workers", "X=1"), "ROLE=host:port"),
        (("serve", "--port", str(PORT + 1), "--heartbeat-host", "127.0.0.256"), "heartbeat_open = true"),
        (("serve", "--port", str(PORT + 1), "--heartbeat-host", "*.", "--heartbeat-open"), "heartbeat_host"),
        (("agent", "--role", "Q"), "'P', 'D', 'R'"),
        (("agent", "--role", "P", "--attach", "nowhere"), "http://host:port"),
        (("agent", "--role", "P", "--engine", "vllm"), "model"),
    ],
)
def test_a_wrong_flag_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, argv)
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code != 0
    assert said in done.stderr


async def test_an_error_is_on_stderr_without_a_traceback(tmp_path: Path) -> None:
    process = await start("serve", "--mode", "both", cwd=tmp_path)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert (out, err.decode().count("\n")) == (b"", 1)
    assert err.startswith(b"Error: mode = 'both': ")
