"""The mock backend, as one P and one D, and the load generator."""

from __future__ import annotations

import http.client
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ppd.proxy.errors import PPDError

from .bodies import ChatShape, follow_ups, opening
from .native import Tools
from .processes import HOST, Cores, Program
from .records import LoadResult, Stats
from .rows import LoadMode, Row

_QUIET_S = 1.0
_BURST_S = 20.0  # by then all of the connections made at once must have an answer
_WARM_S = 120.0
_WARM_CONNECTIONS = 32


class TrialError(PPDError):
    """A measurement failed; the message is shown in place of its figures."""


@dataclass(frozen=True, slots=True)
class Backend:
    """The ports of P and D. Both are of one process, whose counts are for the two together."""

    prefill: int
    decode: int

    def stats(self) -> Stats:
        return msgspec.json.decode(_get(self.decode, "/stats"), type=Stats)

    def wait_quiet(self) -> None:
        """Returns when no stream is open. Ends those of routers that do not tell the worker when a client has left."""
        ends_s = time.monotonic() + _QUIET_S
        while self.stats().open:
            if time.monotonic() > ends_s:
                _get(self.decode, "/hang_up")
            time.sleep(0.02)


@contextmanager
def running_backend(tools: Tools, cores: Collection[int], folder: Path) -> Iterator[Backend]:
    with Program([str(tools.mock), "2"], cores, folder / "mock.log", pipes=True) as program:
        yield Backend(*map(int, program.line().split()))


class LoadGenerator:
    """Runs the load generator. No two measurements share a conversation."""

    def __init__(self, tools: Tools, cores: Cores, folder: Path, *, name: str = "", millions: int = 0) -> None:
        """name: added to its file names; millions: of conversation numbers left to other load generators."""
        self._tools = tools
        self._cores = cores
        self._folder = folder
        self._name = name
        self._files: dict[tuple[ChatShape, bool], Path] = {}
        self._first = 1_000_000 * millions

    def new_conversations(self) -> int:
        """The number of the first of a million new conversations."""
        self._first += 1_000_000
        return self._first

    def ask_first_turns(self, row: Row, port: int, first: int) -> None:
        """TrialError if a first turn is not answered."""
        argv = self._argv(LoadMode.CLOSED, port, self._file(row.conversation, is_opening=True))
        argv += [str(min(_WARM_CONNECTIONS, row.connections)), str(_WARM_S), "--fresh", "--first", str(first)]
        argv += ["--requests", str(row.connections), "--words", str(row.conversation.words)]
        with self._started(argv) as program:
            load = finished(program)
        if load.right != row.connections:
            raise TrialError(f"{row.connections - load.right} of {row.connections} first turns were not answered")

    @contextmanager
    def asking(self, row: Row, port: int, first: int, seconds: float) -> Iterator[Program]:
        seconds = {LoadMode.ONCE: _BURST_S, LoadMode.HOLD: 3600.0}.get(row.load, seconds)
        argv = self._argv(row.load, port, self._file(row.conversation, is_opening=row.fresh))
        argv += [str(row.connections), str(seconds), "--first", str(first), "--words", str(row.conversation.words)]
        argv += ["--ramp", str(row.ramp_ms), *(["--rate", str(row.rate)] if row.rate else [])]
        with self._started([*argv, *(["--fresh"] if row.fresh else [])]) as program:
            yield program

    def _argv(self, mode: LoadMode, port: int, bodies: Path) -> list[str]:
        return [str(self._tools.load), mode.value, str(port), str(bodies)]

    def _started(self, argv: list[str]) -> Program:
        return Program(argv, self._cores.load, self._folder / f"load{self._name}.log", pipes=True)

    def _file(self, conversation: ChatShape, *, is_opening: bool) -> Path:
        path = self._files.get((conversation, is_opening))
        if path is None:
            path = self._folder / f"bodies{self._name}-{len(self._files)}.jsonl"
            path.write_bytes(opening(conversation) if is_opening else follow_ups(conversation))
            self._files[conversation, is_opening] = path
        return path


def await_line(program: Program, wanted: str) -> None:
    if (line := program.line()) != wanted:
        said = program.log.read_text(errors="replace").strip()
        raise TrialError(f"the load generator said {line or said!r} in place of {wanted!r}")


def finished(program: Program) -> LoadResult:
    """Reads on to the load generator's end; returns its result."""
    while (line := program.line()) in ("begin", "end"):
        pass
    try:
        return msgspec.json.decode(line, type=LoadResult)
    except msgspec.DecodeError:
        raise TrialError(f"the load generator ended without a result: {program.log.read_text().strip()}") from None


def _get(port: int, path: str) -> bytes:
    try:
        return exchange(port, "GET", path)[1]
    except (OSError, http.client.HTTPException) as exc:
        raise PPDError(f"the mock backend does not answer: {exc}") from exc


def ask_once(port: int) -> bool:
    try:
        return exchange(port, "POST", "/v1/chat/completions", opening(ChatShape()))[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def exchange(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Status and body; OSError or HTTPException where none comes."""
    connection = http.client.HTTPConnection(HOST, port, timeout=5.0)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
