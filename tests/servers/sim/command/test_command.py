"""The engine as a process of its own."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from ppd.proxy.laws.profile_file import ProfileFile, Status, Transfers, encode
from ppd.proxy.laws.step_time import EngineProfile
from ppd.servers.sim.command import command
from ppd.servers.sim.core.tokens import Tokenizer
from tests.support.credentials import Authority, trusting

pytestmark = pytest.mark.e2e  # processes and sockets, for which it waits

ABOUT: Any = {
    "status": Status.MODELLED,
    "model": "m",
    "gpu": "none",
    "gpu_count": 1,
    "engine": "ppd sim",
    "source": "a test",
    "note": "",
    "licence": "Apache-2.0",
    "transfers": Transfers.MISSING,
    "network": "loopback",
}
HI = [{"role": "user", "content": "hi from another process"}]


class Remote:
    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address


@asynccontextmanager
async def process(*flags: str) -> AsyncIterator[Remote]:
    argv = [sys.executable, "-m", "ppd.servers.sim", "--port", "0", *flags]
    started = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    try:
        assert started.stdout is not None
        line = (await started.stdout.readline()).decode()
        found = re.search(r"https?://(\S+)", line)
        assert found, line
        yield Remote(started, found.group(1))
    finally:
        if started.returncode is None:
            started.terminate()
        await started.communicate()


async def test_kv_moves_between_processes_and_sigterm_ends_them(lab: Any) -> None:
    flags = ("--time-scale", "0", "--model", "m", "--seed", "7")
    async with process("--role", "P", *flags) as p, process("--role", "D", *flags) as d:
        replica = await lab.start(model="m", seed=7)
        expected = (await lab.chat(replica, HI)).text
        answer = await lab.split(p, d, HI)
        assert answer.text == expected
        metrics = (await lab.fetch(d, "/metrics")).body.decode()
        assert re.search(r'vllm:prompt_tokens_by_source_total\{[^}]*external_kv_transfer"\} [1-9]', metrics)
        for engine in (p, d):
            engine.process.send_signal(signal.SIGTERM)
            assert await engine.process.wait() == 0


async def test_sigterm_ends_a_stream_as_aborted(lab: Any) -> None:
    async with process("--time-scale", "1") as r:
        body = {"messages": HI, "stream": True, "max_tokens": 5000, "ignore_eos": True}
        async with lab.session.post(f"http://{r.address}/v1/chat/completions", json=body) as answer:
            await answer.content.readline()
            r.process.send_signal(signal.SIGTERM)
            rest = (await answer.read()).decode()
        assert '"finish_reason":"abort"' in rest
        assert rest.endswith("data: [DONE]\n\n")
        assert await r.process.wait() == 0


async def test_a_process_kills_itself_on_order(lab: Any) -> None:
    async with process("--time-scale", "0", "--allow-faults") as r:
        order = {"kind": "kill", "phase": "events", "after_events": 3, "leg": "plain"}
        await lab.post(r, "/faults", {"orders": [order]})
        body = {"messages": HI, "stream": True, "max_tokens": 50, "ignore_eos": True}
        seen = b""
        with pytest.raises(aiohttp.ClientError):
            async with lab.session.post(f"http://{r.address}/v1/chat/completions", json=body) as answer:
                async for line in answer.content:
                    seen += line
        assert await r.process.wait() == -signal.SIGKILL
        assert seen.count(b"data: ") == 3


async def test_a_profile_says_what_flags_do_not(lab: Any, tmp_path: Path) -> None:
    costs = EngineProfile(step_s=1e-3, max_batched_tokens=512)
    path = tmp_path / "small.json"
    path.write_bytes(encode(ProfileFile(name="small", costs=costs, kv_capacity_tokens=6400, block_size=32, **ABOUT)))
    model = ("--template", "glm", "--tokenizer", "pieces", "--reasoning", "1", "--reasoning-field", "reasoning_content")
    async with process("--profile", str(path), "--max-model-len", "3000", "--num-blocks", "100", *model) as r:
        answer = (await lab.chat(r, HI, max_tokens=20, return_token_ids=True)).json
        assert (
            Tokenizer.PIECES.tokens("[gMASK]<sop><|user|>\nhi from another process<|assistant|>")
            == (answer["prompt_token_ids"])
        )
        assert answer["choices"][0]["message"]["reasoning_content"]
        metrics = (await lab.fetch(r, "/metrics")).body.decode()
        assert re.search(r'vllm:cache_config_info\{[^}]*block_size="32"[^}]*num_gpu_blocks="100"', metrics), metrics


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--block-size", "0"], "block_size must be positive"),
        (["--num-blocks", "1"], "max_model_len must fit"),
        (["--role", "X"], "--role"),
        (["--template", "llama"], "--template"),
        (["--reasoning", "2"], "--reasoning"),
        (["--max-num-batched-tokens", "0"], "max_batched_tokens"),
        (["--long-prefill-token-threshold", "-1"], "long_prefill_tokens must not be negative"),
        (["--profile", "no-such-engine"], "must be "),
        (["--port", "99999"], "--port"),
        (["--side-channel-port", "99999"], "--side-channel-port"),
        (
            ["--kv-events-endpoint", "tcp://*:65536"],
            "kv_events_endpoint must have a port up to 65535, got tcp://*:65536",
        ),
        (["--kv-events-replay-endpoint", "tcp://*"], "kv_events_replay_endpoint must have a port up to 65535"),
        (["--time-scale", "nan"], "time_scale must be a finite number of at least 0, got nan"),
        (["--time-scale", "inf"], "time_scale must be a finite number of at least 0, got inf"),
        (["--encoder-item-s", "-1"], "encoder_item_s must be a finite number of at least 0, got -1.0"),
        (["--lease-s", "nan"], "lease_s must be positive, got nan"),
        (["--ssl-keyfile", "key.pem"], "ssl_keyfile needs ssl_certfile"),
    ],
)
def test_impossible_settings_are_refused(flags: list[str], said: str) -> None:
    result = CliRunner().invoke(command, flags)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(("flag", "param"), [("--port", "port"), ("--side-channel-port", "side_channel_port")])
def test_a_taken_port_is_one_line_that_names_it(flag: str, param: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = CliRunner().invoke(command, ["--role", "P", "--port", "0", flag, str(port)])
    assert said.exit_code == 1
    assert said.output == f"Error: {param} = {port}: must be a free port on 127.0.0.1 (Address already in use)\n"


def test_a_host_that_nobody_knows_is_named() -> None:
    said = CliRunner().invoke(command, ["--host", "no-such-host.invalid", "--port", "0"])
    assert said.exit_code == 1
    assert said.output.startswith("Error: host = 'no-such-host.invalid': must be a name or an address of this machine")


async def test_with_a_certificate_it_speaks_tls_alone(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("engine")
    async with (
        process("--ssl-certfile", own.cert, "--ssl-keyfile", own.key) as engine,
        aiohttp.ClientSession() as session,
    ):
        async with session.get(f"https://{engine.address}/health", ssl=trusting(authority)) as answer:
            assert answer.status == 200
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(f"http://{engine.address}/health")


@pytest.mark.parametrize("key", ["missing", "locked"])
def test_a_certificate_that_cannot_be_used_is_one_line(tmp_path: Path, key: str) -> None:
    own = Authority(tmp_path).issue("engine", password="secret")
    keyfile = own.key if key == "locked" else str(tmp_path / "missing.key")
    said = CliRunner().invoke(command, ["--port", "0", "--ssl-certfile", own.cert, "--ssl-keyfile", keyfile])
    assert said.exit_code == 1
    told = f"Error: ssl_certfile = {own.cert!r} and ssl_keyfile = {keyfile!r}: must be a PEM certificate and its key ("
    assert said.output.startswith(told) and said.output.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "variable", "status"),
    [((), "", 404), (("--stores-responses",), "", 200), ((), "1", 200), ((), "0", 404)],
)
async def test_responses_are_stored_if_it_is_told_so_as_vllm_is(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], variable: str, status: int
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", variable)
    async with process("--role", "R", *flags) as engine, aiohttp.ClientSession() as session:
        url = f"http://{engine.address}/v1/responses"
        async with session.post(url, json={"model": "sim", "input": "hi", "max_output_tokens": 2}) as made:
            stored = (await made.json())["id"]
        async with session.get(f"{url}/{stored}") as answer:
            assert answer.status == status
