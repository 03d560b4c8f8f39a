"""The picker's ports: Envoy's calls, and health checks on one of their own where asked for."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from ..app.client_routes import is_ready
from ..assembly import Proxy
from ..config import cannot_listen
from ..runtime.process_limits import open_files_limit, share_of_gateways
from ..runtime.tasks import Background
from .health import EXTERNAL_PROCESSOR, HealthCheck, HealthWatch
from .other_requests import App
from .picking import PickerCall
from .reports import Reports
from .shadowing import Shadow, ShadowCall
from .wire.grpc import GrpcConnection, Method
from .wire.open_connections import OpenConnections
from .workers_file import WorkersFile

BACKLOG = 1024


class Gateway:
    """Opened and closed with its proxy."""

    def __init__(self, proxy: Proxy, app: App) -> None:
        """app: answers what is no turn."""
        self._proxy = proxy
        self._app = app
        membership = proxy.membership
        self.reports = Reports(membership.report if membership.peers else None)
        proxy.listener.on_report, membership.on_report = self.reports.taken, self.reports.told
        self._servers: list[asyncio.Server] = []
        self._connections = OpenConnections(share_of_gateways(open_files_limit()))
        self._background = Background()

    async def open(self) -> None:
        """ConfigError if a port is taken."""
        config = self._proxy.settings.config
        self._proxy.state.metrics.watch(self.reports.gauges)
        self._proxy.state.metrics.watch(self._connections.gauges)
        ready = partial(is_ready, self._proxy)
        health: dict[bytes, Method] = {
            b"/grpc.health.v1.Health/Check": lambda call: HealthCheck(call, ready),
            b"/grpc.health.v1.Health/Watch": lambda call: HealthWatch(call, ready),
        }
        process = f"/{EXTERNAL_PROCESSOR}/Process".encode()
        await self._listen("picker_port", config.picker_port, {**health, process: self._process()})
        if config.picker_workers_file and self._proxy.membership.leads:
            file = WorkersFile(Path(config.picker_workers_file), self._proxy.state.registry)
            file.open()
            self._background.start("workers for Envoy", file.watch)
        if config.picker_health_port:
            await self._listen("picker_health_port", config.picker_health_port, health)

    def _process(self) -> Method:
        if not self._proxy.settings.config.picker_shadow:
            return partial(PickerCall, self._proxy, self._app, self.reports)
        shadow = Shadow()
        self._proxy.state.metrics.watch(shadow.gauges)
        return partial(ShadowCall, self._proxy, self.reports, shadow)

    def go_away(self) -> None:
        """No new calls; those under way end as usual."""
        for server in self._servers:
            server.close()
        for connection in self._connections:
            connection.go_away()

    async def drained(self, limit_s: float) -> None:
        """Until no call is under way, or no longer than that."""
        until_s = asyncio.get_running_loop().time() + limit_s
        while any(not one.is_idle for one in self._connections) and asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        await self._background.close()
        for server in self._servers:
            server.close()
        for connection in self._connections:
            connection.close()

    async def _listen(self, key: str, port: int, methods: dict[bytes, Method]) -> None:
        config, loop = self._proxy.settings.config, asyncio.get_running_loop()
        try:
            # Each process of the proxy has the port: the kernel spreads Envoy's connections over them.
            server = await loop.create_server(
                lambda: GrpcConnection(methods, self._connections),
                config.picker_host.strip("[]"),
                port,
                backlog=BACKLOG,
                reuse_port=config.processes > 1,
            )
        except OSError as exc:
            raise cannot_listen(key, port, "picker_host", config.picker_host, exc) from exc
        self._servers.append(server)
