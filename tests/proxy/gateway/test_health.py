"""What gRPC's health checks say of a picker, by service, by its fleet, and at its end."""

from __future__ import annotations

import pytest

from ppd.proxy.app.client_routes import is_ready
from ppd.proxy.assembly import Proxy
from ppd.proxy.gateway.health import HealthCheck
from ppd.proxy.gateway.messages import HealthCheckRequest, HealthCheckResponse
from ppd.proxy.gateway.wire.grpc import GrpcStatus
from tests.proxy.gateway.envoy import D1, P1, R1, proxy_of

SERVING, NOT_SERVING = 1, 2


class Call:
    def __init__(self) -> None:
        self.told: list[int] = []
        self.status: GrpcStatus | None = None

    def send(self, message: bytes) -> None:
        self.told.append(HealthCheckResponse.FromString(message).status)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, message: str = "") -> None:
        self.status = status


def checked(proxy: Proxy, service: str) -> list[int]:
    call = Call()
    HealthCheck(call, lambda: is_ready(proxy)).message(HealthCheckRequest(service=service).SerializeToString())  # type: ignore[arg-type]
    return call.told


@pytest.mark.parametrize(
    ("workers", "is_able"),
    [
        ((), False),
        ((f"P={P1}",), False),
        ((f"E={P1}",), False),
        ((f"P={P1}", f"D={D1}"), True),
        ((f"D={D1}",), True),
        ((f"R={R1}",), True),
        ((f"D={D1},connector=sglang,engine=sglang",), False),  # takes no turn without its P
    ],
)
async def test_a_picker_is_ready_when_a_worker_can_answer_turns(workers: tuple[str, ...], is_able: bool) -> None:
    proxy = proxy_of(workers)
    expected = [SERVING if is_able else NOT_SERVING]
    for service in ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        assert checked(proxy, service) == expected
    assert checked(proxy, "liveness") == [SERVING]


@pytest.mark.parametrize("ends", ["queue", "drain"])
async def test_a_picker_that_ends_is_not_ready(ends: str) -> None:
    proxy = proxy_of()
    if ends == "queue":
        proxy.state.admission.close_down()
    else:
        proxy.drain.announce()
    assert (checked(proxy, "readiness"), checked(proxy, "liveness")) == ([NOT_SERVING], [SERVING])
