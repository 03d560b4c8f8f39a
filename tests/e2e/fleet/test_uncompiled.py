"""The commands where the compiled modules are missing, as after an installation without a C compiler."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ppd.proxy.cli.doctor.command import command
from ppd.proxy.fleet.worker import Role
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.launch import running_engine
from tests.support.proxy import ADMIN_KEY
from tests.support.serve_program import serving

pytestmark = pytest.mark.e2e
PLANE = Path(__file__).parents[3] / "proxy/plane"

# Python runs a module of this name at its start, in each process of the proxy: an import of these then fails.
MISSING = "import sys; sys.modules |= dict.fromkeys({names})"


@pytest.fixture
def uncompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"ppd.proxy.plane.{path.stem}" for path in PLANE.glob("*.pyx")]
    (tmp_path / "sitecustomize.py").write_text(MISSING.format(names=names))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("uncompiled")
async def test_direct_serves_in_place_of_native_and_says_so_once(tmp_path: Path) -> None:
    config = SimConfig(role=Role.REPLICA)
    flags = ("--mode", "replica", "--data-plane", "native")
    async with running_engine(config) as engine, serving(tmp_path, [f"R={engine.address}"], 2, *flags) as program:
        body = {"model": "sim", "messages": [{"role": "user", "content": "Who serves?"}], "max_tokens": 4}
        async with program.session.post(f"{program.base_url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
        async with program.session.get(f"{program.base_url}/metrics") as answer:
            assert 'ppd_data_plane_info{built="no",configured="native",plane="direct"} 1.0' in await answer.text()
        ask = ["--proxy", program.base_url, "--admin-key", ADMIN_KEY]
        told = await asyncio.to_thread(CliRunner(env={"COLUMNS": "200"}).invoke, command, ask)
        assert "native is not built there, so direct serves" in told.output
    assert (tmp_path / "log").read_text().count("data_plane = native is not built here, so direct serves") == 1


@pytest.mark.usefixtures("uncompiled")
def test_every_command_can_be_loaded() -> None:
    load = "from ppd.servers.cli.main import COMMANDS, main; [main.get_command(None, name) for name in COMMANDS]"
    ended = subprocess.run([sys.executable, "-c", load], stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
