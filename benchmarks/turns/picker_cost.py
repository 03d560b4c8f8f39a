"""What a turn costs an endpoint picker: CPU from Envoy's bytes to the answer's, without sockets.

    python -m benchmarks.turns.picker_cost

The last turns of conversations, as HTTP/2 frames of one connection: the head, the body, the answer's head, and the end
of the call, each as Envoy 1.40 sends it. With the proxy's reading, session, decision and bookkeeping; `frames` is the
same number of messages to a method that answers at once. The event loop and the garbage collector are set as the
picker's are.
"""

from __future__ import annotations

import asyncio
import struct
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import click

from ppd.offline.experiment.statistics import percentile
from ppd.proxy.app.client_routes import create_app
from ppd.proxy.assembly import Proxy
from ppd.proxy.gateway.answers import carry_on
from ppd.proxy.gateway.messages import BUFFERED, ProcessingRequest
from ppd.proxy.gateway.picking import PickerCall
from ppd.proxy.gateway.reports import Reports
from ppd.proxy.gateway.wire.frames import END_HEADERS, PREFACE, Code, FrameType, frame
from ppd.proxy.gateway.wire.grpc import GrpcCall, GrpcConnection, MessageTaker, Method
from ppd.proxy.gateway.wire.open_connections import OpenConnections
from ppd.proxy.runtime.process import new_loop
from ppd.proxy.runtime.process_limits import collect_garbage_less

from ..small.decision_cost import SIZES, WARM_UP, conversation
from ..small.proxy_here import bench

PATH = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"
PIECE = 16_384
# A call's head in HPACK, as Envoy writes the first one of a connection, and all later ones.
FIRST_BLOCK = bytes.fromhex(
    "8304a560b5773fa5d05b3b98855cbe5315761c8bf7657c1e525b2a1d1aec390a841ec635d87215084185acc4ea5b3f8640027465864d833505"
    "b11f5f8b1d75d0620d263d4c4d6564408cf2b16aee7f4b1aa496ca8747834d9697408bf2b4a7b3c0ec90b22d29ec870be25c0b89717f4096f2"
    "b16aee7f4b17cd65224b22d6765926a4a7b52b528f840800007f"
)
BLOCK = bytes.fromhex("8304a560b5773fa5d05b3b98855cbe5315761c8bf7657c1e525b2a1d1aec390a841ec635d8721508c386c2c1c0bfbe")
SIZES_SHOWN = ("2 KB", "130 KB", "600 KB")


@dataclass
class Transport:
    """Takes what is written."""

    written: list[bytes] = field(default_factory=list)

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def get_extra_info(self, name: str) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        raise AssertionError("the connection was refused")


class Nothing:
    """A method that answers each message at once."""

    def __init__(self, call: GrpcCall) -> None:
        self._call = call
        self._answer = carry_on("request_headers")

    def message(self, data: bytes | memoryview) -> None:
        self._call.send(self._answer)

    def half_closed(self) -> None: ...

    def lost(self) -> None: ...


def message(stage: str, **values: Any) -> bytes:
    request = ProcessingRequest()
    part = getattr(request, stage)
    part.SetInParent()
    for name, value in values.pop("headers", {}).items():
        part.headers.headers.add(key=name, raw_value=value)
    for name, value in values.items():
        setattr(part, name, value)
    request.metadata_context.SetInParent()
    if stage == "request_headers":
        request.protocol_config.request_body_mode = BUFFERED
    encoded: bytes = request.SerializeToString()
    return struct.pack(">BI", 0, len(encoded)) + encoded


def request_head(request_id: bytes, size: int) -> bytes:
    headers = {
        ":authority": b"gateway",
        ":path": b"/v1/chat/completions",
        ":method": b"POST",
        ":scheme": b"http",
        "accept": b"application/json",
        "accept-encoding": b"gzip, deflate",
        "content-length": b"%d" % size,
        "content-type": b"application/json",
        "user-agent": b"python",
        "x-forwarded-proto": b"http",
        "x-request-id": request_id,
    }
    return message("request_headers", headers=headers)


ANSWER_HEAD = message(
    "response_headers",
    headers={
        ":status": b"200",
        "date": b"Fri, 20 Nov 2026 17:45:18 GMT",
        "server": b"uvicorn",
        "content-type": b"text/event-stream; charset=utf-8",
        "transfer-encoding": b"chunked",
        "x-envoy-upstream-service-time": b"0",
    },
)


def data(stream: int, sent: bytes) -> bytes:
    pieces = [sent[at : at + PIECE] for at in range(0, len(sent), PIECE)]
    return b"".join(frame(FrameType.DATA, 0, stream, piece) for piece in pieces)


class Gateway:
    """One connection of Envoy's, to a picker or to another method."""

    def __init__(self, method: Method) -> None:
        self.transport = Transport()
        self._to = GrpcConnection({PATH: method}, OpenConnections())
        self._to.connection_made(self.transport)  # type: ignore[arg-type]
        self._to.data_received(PREFACE + frame(FrameType.SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 28)))
        self._to.data_received(frame(FrameType.WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30)))
        self._streams = iter(range(1, 1 << 30, 2))

    def reads(self, body: bytes) -> list[bytes]:
        """What comes of the next turn, by reads."""
        stream = next(self._streams)
        request_id = b"b3149a99-8b9f-4fba-a4ba-%012x" % stream
        head = frame(FrameType.HEADERS, END_HEADERS, stream, FIRST_BLOCK if stream == 1 else BLOCK)
        return [
            head + data(stream, request_head(request_id, len(body))),
            data(stream, message("request_body", body=body, end_of_stream=True)),
            data(stream, ANSWER_HEAD),
            frame(FrameType.RST_STREAM, 0, stream, struct.pack(">I", Code.CANCEL)),
        ]

    async def turn(self, reads: list[bytes]) -> float:
        """Microseconds of CPU."""
        self.transport.written.clear()
        spent_ns = self._received(*reads[:2])
        while len(self.transport.written) < 2:  # the head's answer, and the body's
            began_ns = time.thread_time_ns()
            await asyncio.sleep(0)
            spent_ns += time.thread_time_ns() - began_ns
        return (spent_ns + self._received(*reads[2:])) / 1000

    def _received(self, *reads: bytes) -> int:
        began_ns = time.thread_time_ns()
        for each in reads:
            self._to.data_received(each)
        return time.thread_time_ns() - began_ns


async def measure(method: Method, name: str, rounds: int, tools: int, first: int) -> float:
    """Median microseconds of CPU a turn."""
    gateway = Gateway(method)
    numbers = range(first, first + rounds + WARM_UP)
    bodies = [conversation(number, *SIZES[name], tools) for number in numbers]
    for earlier, _ in bodies:
        if earlier is not None:
            await gateway.turn(gateway.reads(earlier))
    collect_garbage_less()
    spent_us = [await gateway.turn(gateway.reads(last)) for _, last in bodies]
    return percentile(spent_us[WARM_UP:], 0.5)


def picker(proxy: Proxy) -> Method:
    return partial(PickerCall, proxy, create_app(proxy), Reports())


async def compare(rounds: int, tools: int) -> None:
    asked = picker(bench(tools).proxy)
    click.echo("| body | frames, us | picker, us |\n| --- | --- | --- |")
    for at, name in enumerate(SIZES_SHOWN):
        nothing = await measure(Nothing, name, rounds, tools, at * 10**6)
        picked = await measure(asked, name, rounds, tools, at * 10**6)
        click.echo(f"| {name} | {nothing:.0f} | {picked:.0f} |")


@click.command(help=__doc__)
@click.option("--rounds", default=500, show_default=True, help="Timed turns of each size.")
@click.option("--tools", default=0, show_default=True, help="In each body.")
def main(rounds: int, tools: int) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(compare(rounds, tools))


_: type[MessageTaker] = Nothing

if __name__ == "__main__":
    main()
