"""How many Python functions of the proxy a turn calls from its first byte to its answer's last, sockets included.

    python -m benchmarks.turns.served_calls                  # the functions that are called most
    python -m benchmarks.turns.served_calls --instructions   # those that take most instructions of Python's bytecode

With what `benchmarks.turns.calls` counts by, and one kept connection from a client to a proxy in this process. The
workers are the mock backend, so the compiled plane, HTTP and the connections to workers take part.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from ppd.proxy.config import ProxyConfig

from ..overhead.backend import running_backend
from ..overhead.bodies import MODEL
from ..overhead.native import build, cache_folder
from ..overhead.processes import HOST
from ..small import proxy_here
from .calls import CONVERSATIONS, TurnWork, bodies, command, counted

LIMITS = {"SPLIT": 562, "LOCAL": 402}
"""With the compiled modules; of the first turn of a conversation of three messages, and of its second. Lower them.

A few calls more or less are chance: whether an answer is there before it is waited for.
"""

_HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: ppd\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


async def count() -> dict[str, TurnWork]:
    """By route: what the turn of several did that called the fewest functions; see `calls.count`."""
    found: dict[str, TurnWork] = {}
    with (
        TemporaryDirectory() as folder,
        running_backend(build(cache_folder()), os.sched_getaffinity(0), Path(folder)) as backend,
    ):
        workers = (f"P={HOST}:{backend.prefill},model={MODEL}", f"D={HOST}:{backend.decode},model={MODEL}")
        async with proxy_here.serving(ProxyConfig(port=0, workers=workers, heartbeat_port=0)) as url:
            reader, writer = await asyncio.open_connection(HOST, int(url.rpartition(":")[2]))
            try:
                for number in range(CONVERSATIONS):
                    for body in bodies(number):
                        said = body.replace(proxy_here.MODEL.encode(), MODEL.encode())
                        route, work = await counted(_ask(reader, writer, said))
                        found[route] = min(found.get(route, work), work, key=lambda each: each.calls.total())
            finally:
                writer.close()
    return found


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> str:
    """The answer's route."""
    writer.write(_HEAD % len(body) + body)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    fields = dict(line.split(": ", 1) for line in head.splitlines()[1:-1])
    await reader.readexactly(int(fields["content-length"]))
    return fields["x-ppd-route"].upper()


main = command(
    count, LIMITS, "Counts the Python calls of a SPLIT and of a LOCAL turn, sockets included, and their instructions."
)


if __name__ == "__main__":
    main()
