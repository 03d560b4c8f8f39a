"""Records what llm-d's sidecar asks engines and answers clients.

    python -m tests.servers.sidecar.llm_d.record PD_SIDECAR chat            # the binary, and scripts; none: all of them

A process of the binary for each script, between engines that note what they are asked; one file in tests/data/llm_d,
whose README says how the binary was built.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from ppd.servers.fleet.ports import free_ports

from .exchange import LIMIT_S, play
from .scripts import SCRIPTS

FOLDER = Path(__file__).parents[3] / "data" / "llm_d"
PLAIN = "--secure-proxy=false"  # it speaks HTTP with its client


async def record(binary: Path, name: str) -> None:
    script = SCRIPTS[name]

    @asynccontextmanager
    async def sidecar(engine: str, _: Mapping[str, str]) -> AsyncIterator[str]:
        (port,) = free_ports(1)
        argv = (PLAIN, f"--port={port}", f"--model-server-port={engine.rpartition(':')[2]}", *script.flags)
        process = await asyncio.create_subprocess_exec(binary, *argv, stderr=asyncio.subprocess.DEVNULL)
        try:
            await until_open(port)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            await process.wait()

    played = await play(script, sidecar)
    file = FOLDER / f"sidecar_{name}.json"
    file.write_text(json.dumps(played, indent=1) + "\n")
    print(file.name, played["answer"]["status"])


async def until_open(port: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return


async def main(binary: Path, names: Sequence[str]) -> None:
    for name in names or SCRIPTS:
        await record(binary, name)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
