"""What a turn costs an endpoint picker: CPU from Envoy's bytes to the answer's, without sockets.

    python -m benchmarks.turns.picker_cost

The last turns of conversations, as HTTP/2 frames of one connection: the head, the body, the answer's head, and the end
of the call. With the proxy's reading, session, decision and bookkeeping; `frames` is the same number of messages to a
method that answers at once.
"""

from __future__ import annotations

import asyncio
import gc
import struct
import time
from functools import partial
from typing import Any

import click

from ppd.offline.experiment.statistics import percentile
from ppd.proxy.app.client_routes import create_app
from ppd.proxy.assembly import Proxy
from ppd.proxy.gateway.answers import carry_on
from ppd.proxy.gateway.messages import ProcessingRequest
from ppd.proxy.gateway.picking import PickerCall
from ppd.proxy.gateway.reports import Reports
from ppd.proxy.gateway.wire.frames import END_HEADERS, END_STREAM, PREFACE, FrameType, frame
from ppd.proxy.gateway.wire.grpc import GrpcCall, GrpcConnection, MessageTaker

from ..small.decision_cost import SIZES, WARM_UP, conversation
from ..small.proxy_here import bench

PATH = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"
PIECE = 16_384
BLOCK = b"\x83\x86\x04" + bytes((len(PATH),)) + PATH + b"\x0f\x10\x10application/grpc"  # of HPACK
SIZES_SHOWN = ("2 KB", "130 KB", "600 KB")


class Transport:
    """Takes what is written."""

    def write(self, data: bytes) -> None:
        self.written = data

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        raise AssertionError("the connection was refused")


class Nothing:
    """A method that answers each message at once."""

    def __init__(self, call: GrpcCall) -> None:
        self._call = call
        self._answer = carry_on("request_headers")

    def message(self, data: bytes) -> None:
        self._call.send(self._answer)

    def half_closed(self) -> None:
        self._call.finish()

    def lost(self) -> None: ...


def message(stage: str, **values: Any) -> bytes:
    request = ProcessingRequest()
    part = getattr(request, stage)
    part.SetInParent()
    for name, value in values.pop("headers", {}).items():
        part.headers.headers.add(key=name, raw_value=value)
    for name, value in values.items():
        setattr(part, name, value)
    encoded: bytes = request.SerializeToString()
    return struct.pack(">BI", 0, len(encoded)) + encoded


REQUEST_HEAD = message(
    "request_headers",
    headers={
        ":method": b"POST",
        ":path": b"/v1/chat/completions",
        ":authority": b"gateway",
        "content-type": b"application/json",
        "user-agent": b"python",
        "x-forwarded-proto": b"http",
        "x-request-id": b"b3149a99-8b9f-4fba-a4ba-a6044deff49e",
    },
)
ANSWER_HEAD = message("response_headers", headers={":status": b"200", "content-type": b"text/event-stream"})


def data(stream: int, sent: bytes, flags: int = 0) -> bytes:
    pieces = [sent[at : at + PIECE] for at in range(0, len(sent), PIECE)]
    return b"".join(frame(FrameType.DATA, flags, stream, piece) for piece in pieces or [b""])


def connection(method: Any) -> GrpcConnection:
    made = GrpcConnection({PATH: method}, set())
    made.connection_made(Transport())  # type: ignore[arg-type]
    made.data_received(PREFACE + frame(FrameType.SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 28)))
    made.data_received(frame(FrameType.WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30)))
    return made


async def turn(to: GrpcConnection, stream: int, body: bytes) -> None:
    whole = message("request_body", body=body, end_of_stream=True)
    head = frame(FrameType.HEADERS, END_HEADERS, stream, BLOCK)
    pieces = [head + data(stream, REQUEST_HEAD), data(stream, whole), data(stream, ANSWER_HEAD)]
    began_ns = time.thread_time_ns()
    to.data_received(pieces[0])
    to.data_received(pieces[1])
    spent_ns = time.thread_time_ns() - began_ns
    while asyncio.all_tasks() - {asyncio.current_task()}:  # to look for them is not the picker's cost
        began_ns = time.thread_time_ns()
        await asyncio.sleep(0)
        spent_ns += time.thread_time_ns() - began_ns
    began_ns = time.thread_time_ns()
    to.data_received(pieces[2])
    to.data_received(data(stream, b"", END_STREAM))
    SPENT_US.append((spent_ns + time.thread_time_ns() - began_ns) / 1000)


SPENT_US: list[float] = []


async def measure(method: Any, name: str, rounds: int, tools: int, first: int) -> float:
    """Median microseconds of CPU a turn."""
    one = connection(method)
    numbers = range(first, first + rounds + WARM_UP)
    bodies = [conversation(number, *SIZES[name], tools) for number in numbers]
    streams = iter(range(1, 1 << 30, 2))
    for earlier, _ in bodies:
        if earlier is not None:
            await turn(one, next(streams), earlier)
    gc.freeze()
    SPENT_US.clear()
    for _, last in bodies:
        await turn(one, next(streams), last)
    return percentile(SPENT_US[WARM_UP:], 0.5)


async def compare(rounds: int, tools: int) -> None:
    proxy: Proxy = bench(tools).proxy
    picker = partial(PickerCall, proxy, create_app(proxy), Reports())
    click.echo("| body | frames, us | picker, us |\n| --- | --- | --- |")
    for at, name in enumerate(SIZES_SHOWN):
        nothing = await measure(Nothing, name, rounds, tools, at * 10**6)
        picked = await measure(picker, name, rounds, tools, at * 10**6)
        click.echo(f"| {name} | {nothing:.0f} | {picked:.0f} |")


@click.command(help=__doc__)
@click.option("--rounds", default=500, show_default=True, help="Timed turns of each size.")
@click.option("--tools", default=0, show_default=True, help="In each body.")
def main(rounds: int, tools: int) -> None:
    asyncio.run(compare(rounds, tools))


_: type[MessageTaker] = Nothing

if __name__ == "__main__":
    main()
