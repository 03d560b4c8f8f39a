"""One request of Envoy's to a picker, stage by stage, without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ppd.proxy.app.client_routes import create_app
from ppd.proxy.assembly import Proxy, assemble
from ppd.proxy.config import ProxyConfig
from ppd.proxy.gateway.messages import BUFFERED, FULL_DUPLEX_STREAMED, ProcessingRequest, ProcessingResponse
from ppd.proxy.gateway.picking import PickerCall
from ppd.proxy.gateway.reports import Reports
from ppd.proxy.gateway.wire.grpc import GrpcStatus, MessageTaker
from ppd.proxy.settings import Settings
from ppd.proxy.telemetry.receipts import Receipt
from tests.support.fleet import has_work

P1, D1, D2, R1 = "10.0.0.1:8000", "10.0.1.1:8000", "10.0.1.2:8000", "10.0.2.1:8000"
SPLITS = (f"P={P1}", f"D={D1}", f"D={D2}")
CHAT = "/v1/chat/completions"
SAID = [{"role": "user", "content": "What is a prefix, and why is it cached? " * 40}]
USAGE = {"prompt_tokens": 800, "completion_tokens": 3, "total_tokens": 803}


MADE: list[Proxy] = []


def proxy_of(workers: tuple[str, ...] = SPLITS, **settings: Any) -> Proxy:
    """Without sockets; its workers are up."""
    config = ProxyConfig(workers=workers, heartbeat_port=0, warm_up_s=0.0, **settings)
    proxy = assemble(Settings(config))
    MADE.append(proxy)
    for worker in proxy.settings.static_workers:
        proxy.state.registry.add_static(worker, proxy.state.now())
        proxy.state.registry.probed(worker.id, worker, None, proxy.state.now())
    return proxy


@dataclass
class Envoy:
    """One request of Envoy's, stage by stage."""

    proxy: Proxy
    answers: list[Any] = field(default_factory=list)
    status: GrpcStatus | None = None
    duplex: bool = False
    body_mode: int = BUFFERED
    observed: bool = False
    reports: Reports = field(default_factory=Reports)

    def __post_init__(self) -> None:
        self.call: MessageTaker = PickerCall(self.proxy, self.answer_other, self.reports, self)  # type: ignore[arg-type]

    async def answer_other(self, scope: Any, receive: Any, send: Any) -> None:
        await create_app(self.proxy)(scope, receive, send)

    def send(self, message: bytes, rest: bytes | memoryview = b"") -> None:
        self.answers.append(ProcessingResponse.FromString(message + rest))

    def finish(self, status: GrpcStatus = GrpcStatus.OK, message: str = "") -> None:
        self.status = status

    def tell(self, stage: str, **values: Any) -> None:
        request = ProcessingRequest(observability_mode=self.observed)
        part = getattr(request, stage)
        part.SetInParent()
        for name, value in values.pop("headers", {}).items():
            part.headers.headers.add(key=name, raw_value=value.encode())
        for namespace, told in values.pop("metadata", {}).items():
            request.metadata_context.filter_metadata[namespace].update(told)
        for name, value in values.items():
            setattr(part, name, value)
        request.metadata_context.SetInParent()
        if stage == "request_headers":
            request.protocol_config.request_body_mode = FULL_DUPLEX_STREAMED if self.duplex else self.body_mode
            if self.duplex:
                request.protocol_config.response_body_mode = FULL_DUPLEX_STREAMED
        self.call.message(request.SerializeToString())

    def head(self, path: str = CHAT, method: str = "POST", **more: Any) -> None:
        headers = {":method": method, ":path": path, "content-type": "application/json", **more.pop("headers", {})}
        self.tell("request_headers", headers=headers, **more)

    async def turn(self, body: bytes | None = None, headers: Mapping[str, str] | None = None, **more: Any) -> None:
        self.head(headers=headers or {}, **more)
        self.tell("request_body", body=chat() if body is None else body, end_of_stream=True)
        await self.settled()

    async def settled(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def receipt(self) -> Receipt:
        return self.proxy.state.receipts.newest(1)[0]

    @property
    def is_idle(self) -> bool:
        state = self.proxy.state
        return not any(map(has_work, state.registry.views())) and not state.admission.inside


def chat(**members: Any) -> bytes:
    return json.dumps({"model": "m", "messages": SAID, **members}).encode()


def mutation(answer: Any, stage: str = "request_body") -> tuple[dict[str, str], list[str]]:
    found = getattr(answer, stage).response.header_mutation
    return {one.header.key: one.header.raw_value.decode() for one in found.set_headers}, list(found.remove_headers)


def refused(answer: Any) -> tuple[int, dict[str, str], Any]:
    told = answer.immediate_response
    headers = {one.header.key: one.header.raw_value.decode() for one in told.headers.set_headers}
    return told.status.code, headers, json.loads(told.body)
