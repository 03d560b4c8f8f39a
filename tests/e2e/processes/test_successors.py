"""`ppd serve --processes 2`, of which one dies while the files that it has read cannot be used."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.engine.engine import SimEngine
from ppd.servers.sim.launch import running_engine
from tests.e2e.fleet.test_profiles import endpoint
from tests.e2e.processes.test_ends import replaced
from tests.support.credentials import Authority, bearer, client, write_keys
from tests.support.decisions import BY_ROLES, LLM_D_HEAD
from tests.support.serve_program import Program, serving, until

CONNECTIONS = 12  # so that both processes take some


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    async with running_engine(SimConfig(shutdown_s=0.1)) as running:
        yield running


async def shown(program: Program, context: ssl.SSLContext) -> set[str]:
    """The names in the certificates that its processes show."""
    names, port = set[str](), int(program.base_url.rpartition(":")[2])
    for _ in range(CONNECTIONS):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        ((_, name),) = writer.get_extra_info("peercert")["subject"][0]
        names.add(str(name))
        writer.transport.abort()
    return names


async def statuses(program: Program, name: str) -> set[int]:
    """What the key of this name gets of its processes."""
    found = set[int]()
    for _ in range(CONNECTIONS):
        async with program.session.get(f"{program.base_url}/v1/models", headers=bearer(name)) as response:
            found.add(response.status)
    return found


def ruin(file: Path, are: str) -> None:
    file.unlink()
    if are == "garbage":
        file.write_text("nonsense")


@pytest.mark.parametrize("are", ["garbage", "gone"])
async def test_a_successor_begins_with_what_was_valid_last(engine: SimEngine, tmp_path: Path, are: str) -> None:
    authority, keys, log = Authority(tmp_path), tmp_path / "keys.toml", tmp_path / "log"
    own, renewed = authority.issue("own"), authority.issue("renewed")
    context = ssl.create_default_context(cafile=authority.ca)
    receipts = tmp_path / "receipts" / "log"
    receipts.parent.mkdir()
    write_keys(keys, client("one"))
    files = {
        "tls-cert-file": own.cert,
        "tls-key-file": own.key,
        "keys-file": str(keys),
        "receipt-log": str(receipts),
    }
    flags = [part for name, file in files.items() for part in (f"--{name}", file)]
    async with serving(tmp_path, [f"R={engine.address}"], 2, *flags, tls=context) as program:
        shutil.copyfile(renewed.cert, own.cert)
        shutil.copyfile(renewed.key, own.key)
        write_keys(keys, client("one"), client("two"))
        readers = 3  # the supervisor is one
        await until(lambda: log.read_text().count("changed certificates are in force") == readers)
        await until(lambda: log.read_text().count("added: two") == readers)
        for file in own.cert, own.key, keys:
            ruin(Path(file), are)
        shutil.rmtree(receipts.parent)
        for victim in program.children():
            os.kill(victim, signal.SIGKILL)
            await until(partial(replaced, program, victim))
        await until(lambda: log.read_text().count("and is started again") == 2)
        assert await shown(program, context) == {"renewed"}
        async with asyncio.timeout(60):
            while (seen := await statuses(program, "two")) != {200}:
                assert seen <= {200, 503}, "the key is known; the new leader may not have asked the worker yet"
        assert await statuses(program, "wrong") == {401}
        assert log.read_text().count("and is started again") == 2, "each was started once"


async def test_the_workers_of_a_file_of_endpoints_outlive_who_read_it(engine: SimEngine, tmp_path: Path) -> None:
    """Also those that were not in it as the proxy began."""
    file, log = tmp_path / "endpoints.yaml", tmp_path / "log"
    discovery = f"- {{type: file-discovery, parameters: {{path: {file}, watchFile: true}}}}\n"
    (plugins := tmp_path / "epp.yaml").write_text(LLM_D_HEAD + BY_ROLES.replace("\n", f"\n{discovery}", 1))
    file.write_text(told := f"endpoints:\n{endpoint(engine, 'one', 'decode')}")
    flags = ("--mode", "profiles", "--epp-config", str(plugins))
    async with running_engine(SimConfig(shutdown_s=0.1)) as other, serving(tmp_path, [], 2, *flags) as program:
        file.write_text(told + endpoint(other, "other", "decode"))
        await until(lambda: log.read_text().count("names 2 endpoints now") == 2)  # to process 0 and to the supervisor
        file.write_text("nonsense: [")
        leader = program.children()[0]
        os.kill(leader, signal.SIGKILL)
        await until(partial(replaced, program, leader))
        await until(lambda: log.read_text().count("mode profiles") == 2)  # its successor serves
        listed = (await program.admin("GET", "/workers"))["workers"]
        assert {worker["id"] for worker in listed} == {engine.address, other.address}
