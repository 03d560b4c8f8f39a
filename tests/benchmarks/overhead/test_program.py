"""The benchmark as a whole, in short: it builds its tools, and measures a direct connection and PPD."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import cycle
from pathlib import Path

import msgspec
import pytest

from benchmarks.overhead.backend import Backend, LoadGenerator, TrialError, await_line, finished, running_backend
from benchmarks.overhead.bodies import MARK, WORD, ChatShape, opening
from benchmarks.overhead.native import Tools, build
from benchmarks.overhead.processes import HOST, Cores, Program
from benchmarks.overhead.records import LoadResult, decode
from benchmarks.overhead.rows import LoadMode, Row

pytestmark = pytest.mark.e2e

EVERYWHERE = frozenset(os.sched_getaffinity(0))
CORES = Cores(EVERYWHERE, EVERYWHERE, EVERYWHERE)
STREAMED = ChatShape(turns=3, words=5, streams=True, every_us=1000)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Tools:
    return build(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def backend(tools: Tools, tmp_path: Path) -> Iterator[Backend]:
    with running_backend(tools, EVERYWHERE, tmp_path) as running:
        yield running


def asked(tools: Tools, backend: Backend, folder: Path, row: Row) -> LoadResult:
    with LoadGenerator(tools, CORES, folder).asking(row, backend.decode, 1, 0.2) as program:
        await_line(program, "begin")
        program.close_stdin()
        return finished(program)


@pytest.mark.parametrize(
    "row",
    [
        Row(name="answers", connections=3, ramp_ms=10),
        Row(name="streams", connections=3, ramp_ms=10, conversation=STREAMED),
        Row(name="fresh", connections=3, ramp_ms=10, fresh=True),
        Row(
            name="long",
            connections=2,
            ramp_ms=10,
            conversation=ChatShape(turns=2, opening_bytes=600_000, message_bytes=30_000),
        ),
        Row(name="open", load=LoadMode.OPEN, connections=9, rate=100.0, conversation=STREAMED),
        Row(name="once", load=LoadMode.ONCE, connections=50, ramp_ms=0, conversation=STREAMED),
    ],
    ids=lambda row: row.name,
)
def test_the_mock_backends_answers_are_right(tools: Tools, backend: Backend, tmp_path: Path, row: Row) -> None:
    load = asked(tools, backend, tmp_path, row)
    assert load.right > 0
    assert load.refused + load.broken + load.refusals + load.wrong == 0
    assert load.first is not None
    assert backend.stats().unknown == 0


@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_mock_backend_finds_its_fields_behind_any_text(backend: Backend, is_chunked: bool) -> None:
    text = MARK.replace("000", "007") + ' \\" \\\\","max_tokens":9,{"stream":true} é ' + "x" * 300
    asked = {"user": text, "messages": [{"content": text}], "nested": {"max_tokens": 8}, "max_tokens": 3}
    body = msgspec.json.encode(asked)
    pieces = iter([body[:7], body[7:250], body[250:]]) if is_chunked else body
    connection = http.client.HTTPConnection(HOST, backend.decode, timeout=5.0)
    with closing(connection):
        connection.request("POST", "/v1/chat/completions", pieces, {}, encode_chunked=is_chunked)
        answer = msgspec.json.decode(connection.getresponse().read())
    assert answer["choices"][0]["message"]["content"] == 3 * WORD
    assert answer["id"] == "chatcmpl-mock-007007007007"


def test_streams_are_held_until_they_are_let_go(tools: Tools, backend: Backend, tmp_path: Path) -> None:
    row = Row(
        name="hold",
        load=LoadMode.HOLD,
        connections=20,
        ramp_ms=10,
        conversation=ChatShape(turns=2, streams=True, every_us=10**9),
    )
    assert asked(tools, backend, tmp_path, row).holding == 20
    backend.wait_quiet()
    assert backend.stats().open == 0
    assert backend.stats().aborted == 20


def test_an_answer_of_another_length_is_wrong(tools: Tools, backend: Backend, tmp_path: Path) -> None:
    bodies = tmp_path / "bodies.jsonl"
    bodies.write_bytes(opening(ChatShape(words=15)))
    argv = [str(tools.load), "closed", str(backend.decode), str(bodies), "2", "0.1", "--words", "16"]
    with Program(argv, EVERYWHERE, tmp_path / "load.log", pipes=True) as program:
        load = finished(program)
    assert load.right == 0
    assert load.wrong > 0


class Refusing(BaseHTTPRequestHandler):
    """Answers 502, 503, 503, and so on."""

    protocol_version = "HTTP/1.1"
    statuses = cycle((502, 503, 503))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(next(self.statuses))
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_refusals_are_counted_by_their_status(tools: Tools, tmp_path: Path) -> None:
    with HTTPServer((HOST, 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        row = Row(name="one", connections=1, ramp_ms=0)
        load = asked(tools, Backend(server.server_port, server.server_port), tmp_path, row)
        server.shutdown()
    assert load.refusals == sum(load.statuses.values()) > 3
    assert load.statuses.keys() == {502, 503}
    assert load.statuses[503] - 2 * load.statuses[502] in (-2, -1, 0)
    assert load.faults == {str(status): count for status, count in load.statuses.items()}


def test_nobody_there_is_a_refusal_and_not_a_hang(tools: Tools, tmp_path: Path) -> None:
    with running_backend(tools, EVERYWHERE, tmp_path) as gone:
        pass
    row = Row(name="once", load=LoadMode.ONCE, connections=5, ramp_ms=0)
    load = asked(tools, gone, tmp_path, row)
    assert (load.refused, load.faults) == (5, {"connection refused": 5})


def test_a_load_generator_without_a_result_says_why(tools: Tools, backend: Backend, tmp_path: Path) -> None:
    with pytest.raises(TrialError, match="usage: load"):
        asked(tools, backend, tmp_path, Row(name="none", connections=0))


def test_a_run_measures_a_direct_connection_and_ppd(tools: Tools, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    argv = [sys.executable, "-m", "benchmarks.overhead", "run", "--subjects", "direct,ppd,smg", "--rows", "c=16"]
    argv += ["--repetitions", "1", "--seconds", "0.3", "--out", str(out)]
    done = subprocess.run(
        argv, env={**os.environ, "PPD_CACHE": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    run = decode(out.read_bytes())
    assert done.stdout == out.with_suffix(".md").read_text() + "\n"
    direct, ppd, smg = run.records
    for record in direct, ppd:
        assert record.problem == ""
        assert record.faults == 0
        assert record.load is not None
        assert record.load.right > 0
        assert record.backend is not None
        assert record.backend.answers >= record.load.right
    assert ppd.cpu_s is not None
    assert ppd.cpu_s > 0
    assert "install" in smg.problem
    assert run.versions["smg"] == "not installed"


def test_a_round_of_churn_leaves_nothing_and_loses_nothing(tools: Tools, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "benchmarks.overhead", "churn", "--minutes", "0.1"]
    done = subprocess.run(
        argv, env={**os.environ, "PPD_CACHE": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *rounds, verdict = done.stdout.splitlines()  # what the proxy tells of failures, or still holds, would come last
    assert verdict.startswith("too few samples")
    assert rounds
    assert all(line.endswith(" 0 faults") for line in rounds)
