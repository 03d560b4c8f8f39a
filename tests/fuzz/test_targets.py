"""The fuzzer's targets: every seed, and some seconds of what grows from the seeds."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from fake_connections import answered
from parser_targets import SEEDS, TARGETS

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SECONDS = dict.fromkeys(TARGETS, 6) | {"clients": 4, "workers": 4}


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_hold(name: str) -> None:
    for seed in (b"", *SEEDS[name]):
        TARGETS[name](seed)


@pytest.mark.parametrize("name", TARGETS)
def test_what_grows_from_the_seeds_holds(name: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="it has wheels for Linux on x86-64 only")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for index, seed in enumerate(SEEDS[name]):
        (corpus / str(index)).write_bytes(seed)
    script = Path(__file__).with_name("fuzz.py")
    # libFuzzer's own limit reads the peak of the process that started it too, which is this test run's.
    options = [f"-max_total_time={SECONDS[name]}", "-seed=1", "-rss_limit_mb=0", f"-artifact_prefix={tmp_path}/"]
    done = subprocess.run(
        [sys.executable, str(script), name, *options, str(corpus)],
        check=False,
        capture_output=True,
        text=True,
        timeout=SECONDS[name] + 60,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 3\r\n\r\nxyz", b"Transfer-Encoding: chunked\r\n\r\n3\r\nxyz\r\n0\r\n\r\n"]
)
def test_an_informational_answer_has_no_body(framing: bytes) -> None:
    """Found by `workers`. The parser itself sees to 100, 102 and 103."""
    final = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    found = asyncio.run(answered([b"HTTP/1.1 104 Upload Resumption Supported\r\n" + framing + final])).answer
    assert found.is_broken or found.body == b"{}"


A, B, END = b"1\r\na\r\n", b"2\r\n\r\n\r\n", b"0\r\n\r\n"  # chunks; the second holds a line end


@pytest.mark.parametrize(
    ("parts", "unparsed"),
    [
        pytest.param([CHUNKED, A, A, A, END], 2, id="from the second on: the first shows where chunks begin"),
        pytest.param([CHUNKED, A, B, B, A, END], 3, id="line ends inside"),
        pytest.param([CHUNKED + A, A, A, END], 1, id="one with the head"),
        pytest.param([CHUNKED, A, A + A, A, A, END], 1, id="two at once are parsed"),
        pytest.param([CHUNKED, A, A[:1], A[1:], A, A, END], 1, id="a cut in its size"),
        pytest.param([CHUNKED, A, b"0", b"1\r\na\r\n", A, END], 1, id="a cut behind a leading zero"),
        pytest.param([CHUNKED, A, b"6\r\n", A, b"\r\n", A, A, END], 1, id="what looks like a chunk inside one"),
        pytest.param([CHUNKED, A, b"1;x=y\r\na\r\n", A, A, END], 1, id="an extension"),
        pytest.param([CHUNKED, A, b"A\r\n0123456789\r\n", A, A, END], 1, id="a size in capitals"),
        pytest.param([CHUNKED, A, A, END[:3], b"X: y\r\n\r\n"], 1, id="trailers"),
        pytest.param([b"HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n", A, A, A], 0, id="a body that holds chunks"),
        pytest.param([b"HTTP/1.1 200 OK\r\n\r\n", A, A, A], 0, id="one that ends with its connection"),
    ],
)
def test_whole_chunks_go_on_unparsed(parts: list[bytes], unparsed: int) -> None:
    shortened = asyncio.run(answered(parts, takes_chunks=True))
    assert shortened == asyncio.run(answered(parts))
    assert shortened.answer.is_whole and shortened.answer.unparsed == unparsed
