"""TLS everywhere behind a real Envoy: its listener, the proxy's port, and workers, each with certificates asked for."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ppd.proxy.config import Mode, ProxyConfig
from ppd.proxy.gateway.envoy_config import envoy_config
from ppd.servers.fleet.gateway import find_envoy
from ppd.servers.fleet.ports import free_ports
from tests.e2e.fleet.test_worker_tls import showing, tls_worker
from tests.e2e.gateway.envoy_program import envoy_before, until_envoy_knows
from tests.support.credentials import Authority, Certificate
from tests.support.proxy import Chat, ProxyClient, running_proxy

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def client_side(authority: Authority, own: Certificate | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.ca)
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return context


@asynccontextmanager
async def secured(
    folder: Path, authority: Authority, worker: ssl.SSLContext, *, in_file: bool, **settings: Any
) -> AsyncIterator[ProxyClient]:
    """What speaks through Envoy to one D with TLS."""
    picker, port, admin = free_ports(3)
    server, own, client = (authority.issue(name) for name in ("server", "proxy", "client"))
    settings |= {
        "picker_port": picker,
        "tls_cert_file": server.cert,
        "tls_key_file": server.key,
        "tls_client_ca_file": authority.ca,
        "worker_ca_file": authority.ca,
        "worker_cert_file": own.cert,
        "worker_key_file": own.key,
        "mode": Mode.ALWAYS_LOCAL,
    }
    if in_file:
        settings["picker_workers_file"] = str(folder / "workers.json")
    tls = client_side(authority, client)
    async with tls_worker(worker) as front:
        settings["workers"] = (f"D={front.address},tls=true",)
        async with (
            running_proxy(tls=tls, **settings) as (proxy, base_url, session),
            envoy_before(proxy, base_url, port, folder, tls=tls, admin_port=admin) as url,
        ):
            through = ProxyClient(proxy, url, session)
            if in_file:
                async with aiohttp.ClientSession() as plain:
                    await until_envoy_knows(plain, admin, 1)
            yield through


@pytest.mark.parametrize("in_file", [False, True], ids=["any address", "known workers"])
async def test_each_side_shows_and_checks_certificates(tmp_path: Path, authority: Authority, in_file: bool) -> None:
    worker = showing(authority.issue("worker"), asks_for=authority.ca)
    async with secured(tmp_path, authority, worker, in_file=in_file, probe_interval_s=0.05) as envoy:
        await envoy.until(lambda: list(envoy.states().values()) == ["up"])
        answer = await Chat(envoy).say("Is anybody there?")
        assert (answer.status, answer.route) == (200, "LOCAL")
        async with envoy.session.get(f"{envoy.base_url}/v1/models") as models:  # over the proxy's own port
            assert models.status == 200
        stranger = aiohttp.TCPConnector(ssl=client_side(authority, None))
        async with aiohttp.ClientSession(connector=stranger) as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"{envoy.base_url}/v1/models")


async def test_a_worker_with_another_hosts_certificate_is_not_asked(tmp_path: Path, authority: Authority) -> None:
    worker = showing(authority.issue("elsewhere", host="127.0.0.2"))
    async with secured(tmp_path, authority, worker, in_file=False, probe_interval_s=60.0) as envoy:
        registry = envoy.proxy.state.registry
        await envoy.until(lambda: list(envoy.states().values()) == ["down"])
        (view,) = registry.views()
        registry.probed(view.id, view.worker, None, envoy.proxy.state.now())  # by a proxy that does not look
        answer = await Chat(envoy).say("Is anybody there?")
        assert (answer.status, answer.body["error"]["type"]) == (503, "gateway_error")


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": ("D=10.0.0.1:8200,tls=true", "R=r1.fleet:8300,tls=true")},
        {"workers": ("D=10.0.0.1:8200,tls=true", "R=10.0.0.2:1"), "picker_workers_file": "workers.json"},
    ],
)
def test_envoy_takes_what_is_written(tmp_path: Path, authority: Authority, settings: dict[str, Any]) -> None:
    server = authority.issue("server")
    if known := settings.get("picker_workers_file"):
        (tmp_path / known).touch()
        settings = {**settings, "picker_workers_file": str(tmp_path / known)}
    config = ProxyConfig(tls_cert_file=server.cert, tls_key_file=server.key, worker_ca_file=authority.ca, **settings)
    (file := tmp_path / "envoy.yaml").write_text(envoy_config(config, ("127.0.0.1", 8080), [("127.0.0.1", 9002)]))
    command = (find_envoy(), "--mode", "validate", "-c", str(file), "--disable-hot-restart", "-l", "error")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
