"""Real processes: health, failure, and that nothing outlives whoever started it."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ppd.servers.fleet.ports import free_ports
from ppd.servers.fleet.process import EngineFailed, EngineProcess
from ppd.servers.vllm.launch import Launch

pytestmark = pytest.mark.e2e  # processes and sockets, for which it waits

# Holds a connection to argv[1] open for as long as it lives.
CONNECT = "import socket, sys; line = socket.create_connection(('127.0.0.1', int(sys.argv[1])))"
WAIT = "import signal; signal.pause()"

SERVER = """
import http.server, sys
class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Engine).serve_forever()
"""


class Lifeline:
    """A port that programs connect to: `joined` waits for the next, `gone` until that one is dead."""

    def __init__(self) -> None:
        self._streams: asyncio.Queue[asyncio.StreamReader] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []
        self.port = 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        await self._streams.put(reader)

    async def joined(self) -> asyncio.StreamReader:
        return await asyncio.wait_for(self._streams.get(), 60)

    @staticmethod
    async def gone(reader: asyncio.StreamReader) -> bool:
        try:
            return await asyncio.wait_for(reader.read(), 60) == b""
        except ConnectionResetError:
            return True

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()


@pytest.fixture
async def lifeline() -> AsyncIterator[Lifeline]:
    line = Lifeline()
    server = await asyncio.start_server(line.accept, "127.0.0.1", 0)
    line.port = server.sockets[0].getsockname()[1]
    yield line
    await line.close()
    server.close()
    await server.wait_closed()


@pytest.fixture
def free_port() -> int:
    return free_ports(1)[0]


def python(code: str, *args: object, **env: str) -> Launch:
    return Launch((sys.executable, "-c", code, *map(str, args)), env)


def process(launch: Launch, folder: Path) -> EngineProcess:
    return EngineProcess(launch, folder / "logs" / "engine.log", name="P1")


async def test_a_healthy_engine_is_waited_for_and_stopped(tmp_path: Path, free_port: int) -> None:
    engine = process(python(SERVER, free_port), tmp_path)
    await engine.start()
    await engine.wait_healthy(f"http://127.0.0.1:{free_port}", timeout_s=30)
    assert engine.is_running
    assert await engine.stop() == 128 + signal.SIGTERM
    assert not engine.is_running
    assert repr(engine) == "<EngineProcess P1: ended 143>"


async def test_an_engine_that_ends_early_fails_at_once_with_its_last_words(tmp_path: Path) -> None:
    engine = process(python("import os, sys; print('no GPU for', os.environ['WHOM']); sys.exit(3)", WHOM="P"), tmp_path)
    await engine.start()
    with pytest.raises(EngineFailed, match=r"P1 ended with 3 before it was healthy(.|\n)*no GPU for P"):
        await engine.wait_healthy("http://127.0.0.1:1", timeout_s=600)


async def test_an_engine_that_never_answers_fails_after_the_limit(tmp_path: Path) -> None:
    async with process(python(WAIT), tmp_path) as engine:
        with pytest.raises(EngineFailed, match=r"not healthy after 0\.05 s"):
            await engine.wait_healthy("http://127.0.0.1:1", timeout_s=0.05)
        assert engine.is_running, "a failed wait leaves the decision to the caller"


async def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    engine = process(Launch(("/no/such/python",)), tmp_path)
    await engine.start()
    with pytest.raises(EngineFailed, match=r"ended with 127(.|\n)*cannot start /no/such/python"):
        await engine.wait_healthy("http://127.0.0.1:1", timeout_s=600)


async def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file where the folder would be")
    engine = EngineProcess(Launch((sys.executable, "-c", "")), taken / "P1.log", name="P1")
    with pytest.raises(EngineFailed, match=f"^P1's log {taken}/P1.log cannot be written: File exists$"):
        await engine.start()


async def test_an_engine_that_ignores_sigterm_is_killed(tmp_path: Path, lifeline: Lifeline) -> None:
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {CONNECT}; {WAIT}"
    engine = process(python(deaf, lifeline.port), tmp_path)
    await engine.start()
    line = await lifeline.joined()
    assert await engine.stop(grace_s=0.1) == 128 + signal.SIGKILL
    assert await lifeline.gone(line)


async def test_stopping_twice_or_without_a_start_is_harmless(tmp_path: Path) -> None:
    engine = process(python(WAIT), tmp_path)
    assert await engine.stop() is None
    await engine.start()
    assert await engine.stop() == await engine.stop() == 128 + signal.SIGTERM


PARENT_OF_DEAF_CHILD = f"""
import os, subprocess, sys
child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {CONNECT}; {WAIT}"
subprocess.Popen([sys.executable, "-c", child, sys.argv[1]])
{CONNECT}
{WAIT}
"""


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_an_engines_children_end_with_it(how: str, tmp_path: Path, lifeline: Lifeline) -> None:
    engine = process(python(PARENT_OF_DEAF_CHILD, lifeline.port), tmp_path)
    await engine.start()
    lines = [await lifeline.joined(), await lifeline.joined()]
    await (engine.stop() if how == "stop" else engine.kill())
    assert [await lifeline.gone(line) for line in lines] == [True, True]


STARTER = """
import asyncio, sys
from pathlib import Path
from ppd.servers.fleet.process import EngineProcess
from ppd.servers.vllm.launch import Launch
async def main():
    await EngineProcess(Launch((sys.executable, "-c", *sys.argv[2:])), Path(sys.argv[1])).start()
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_an_engine_ends_when_its_starter_is_killed(tmp_path: Path, lifeline: Lifeline) -> None:
    starter = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", STARTER, str(tmp_path / "log"), f"{CONNECT}; {WAIT}", str(lifeline.port))
    )
    line = await lifeline.joined()
    starter.kill()
    await starter.wait()
    assert await lifeline.gone(line)


async def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    engine = process(python("print(*range(100), sep='\\n')"), tmp_path)
    assert engine.log_tail() == ""
    await engine.start()
    assert await engine.wait() == 0
    assert engine.log_tail(3) == "97\n98\n99\n"


@pytest.mark.parametrize(("words", "said"), [("bad flag", "the end of {log}:\nbad flag\n"), ("", "{log} is empty")])
async def test_an_end_is_told_with_the_programs_last_words(tmp_path: Path, words: str, said: str) -> None:
    engine = process(python(f"import sys; sys.exit({words!r} or 1)"), tmp_path)
    await engine.start()
    with pytest.raises(EngineFailed) as failed:
        await engine.wait_healthy("http://127.0.0.1:1", timeout_s=60.0)
    assert said.format(log=engine.log_path) in failed.value.message


async def test_a_start_that_is_cancelled_leaves_no_program(tmp_path: Path, lifeline: Lifeline) -> None:
    """However far it has come: the loop stands still until the program runs, and asyncio still waits for its start."""
    began = tmp_path / "began"
    mark = f"import pathlib; pathlib.Path({str(began)!r}).touch(); {WAIT}"
    engine = process(python(f"{CONNECT}; {mark}", lifeline.port), tmp_path)
    starting = asyncio.create_task(engine.start())
    for _ in range(2):  # turns of the loop: now the program has been asked for
        await asyncio.sleep(0)
    ends_s = time.monotonic() + 20
    while not began.exists() and time.monotonic() < ends_s:
        time.sleep(0.01)  # noqa: ASYNC251
    assert began.exists() and not starting.done()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await engine.stop() == 128 + signal.SIGTERM
    assert await lifeline.gone(await lifeline.joined())
