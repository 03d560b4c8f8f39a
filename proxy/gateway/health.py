"""gRPC's health checks (`grpc.health.v1`), by which Envoy and Kubernetes know whether a picker may be asked.

`liveness` is whether this process answers at all; `readiness`, the picker's own service and the empty name are whether
it takes turns: as the proxy's `/ready`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from google.protobuf.message import DecodeError

from .messages import HealthCheckRequest, HealthCheckResponse
from .wire.grpc import GrpcCall, GrpcStatus

EXTERNAL_PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"
READY = ("", "readiness", EXTERNAL_PROCESSOR)
LIVE = "liveness"
WATCH_S = 1.0
_SERVING, _NOT_SERVING, _UNKNOWN = 1, 2, 3


class _Asked:
    """A call that asks for one service."""

    def __init__(self, call: GrpcCall, is_ready: Callable[[], bool]) -> None:
        self._call = call
        self._is_ready = is_ready

    def message(self, data: bytes | memoryview) -> None:
        try:
            service: str = HealthCheckRequest.FromString(data).service
        except DecodeError:
            self._call.finish(GrpcStatus.INVALID_ARGUMENT, "the message is no HealthCheckRequest")
            return
        self._answer(service)

    def half_closed(self) -> None: ...

    def lost(self) -> None: ...

    def _answer(self, service: str) -> None:
        raise NotImplementedError

    def _status(self, service: str) -> int:
        if service == LIVE:
            return _SERVING
        if service not in READY:
            return _UNKNOWN
        return _SERVING if self._is_ready() else _NOT_SERVING

    def _tell(self, status: int) -> None:
        self._call.send(HealthCheckResponse(status=status).SerializeToString())


class HealthCheck(_Asked):
    """Answered once."""

    def _answer(self, service: str) -> None:
        status = self._status(service)
        if status == _UNKNOWN:
            self._call.finish(GrpcStatus.NOT_FOUND, "no service of this name is here")
            return
        self._tell(status)
        self._call.finish()


class HealthWatch(_Asked):
    """Answered now, and at each change."""

    _timer: asyncio.TimerHandle | None = None
    _told = -1

    def lost(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _answer(self, service: str) -> None:
        self.lost()
        status = self._status(service)
        if status != self._told:
            self._told = status
            self._tell(status)
        self._timer = asyncio.get_running_loop().call_later(WATCH_S, self._answer, service)
