"""The fuzzer's targets: every seed, and some seconds of what grows from the seeds."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fuzz.targets import SEEDS, TARGETS
from tests.support.fake_connections import answered

SECONDS = 3  # each; longer by hand, see fuzz.py


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_hold(name: str) -> None:
    for seed in (b"", *SEEDS[name]):
        TARGETS[name](seed)


@pytest.fixture(scope="module")
def fuzzer() -> Iterator[Callable[..., None]]:
    """One process imports and instruments everything, which is most of the work; each target runs in a fork of it."""
    pytest.importorskip("atheris", reason="it has wheels for Linux on x86-64 only")
    script = Path(__file__).with_name("fuzz.py")
    with subprocess.Popen(
        [sys.executable, str(script), "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        told, heard = process.stdin, process.stdout

        def fuzz(log: Path, limit_s: float, *arguments: str) -> None:
            print(json.dumps([str(log), limit_s, *arguments]), file=told, flush=True)
            assert heard.readline() == "0\n", log.read_text(errors="replace")[-3000:]

        yield fuzz
    assert process.returncode == 0


@pytest.mark.parametrize("name", TARGETS)
def test_what_grows_from_the_seeds_holds(name: str, fuzzer: Callable[..., None], tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for index, seed in enumerate(SEEDS[name]):
        (corpus / str(index)).write_bytes(seed)
    # libFuzzer's own limit reads the peak of the process that started it too, which is this test run's.
    options = [f"-max_total_time={SECONDS}", "-seed=1", "-rss_limit_mb=0", f"-artifact_prefix={tmp_path}/"]
    fuzzer(tmp_path / "log", SECONDS + 60, name, *options, str(corpus))


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 3\r\n\r\nxyz", b"Transfer-Encoding: chunked\r\n\r\n3\r\nxyz\r\n0\r\n\r\n"]
)
def test_an_informational_answer_has_no_body(framing: bytes) -> None:
    """Found by `workers`. The parser itself sees to 100, 102 and 103."""
    final = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    found = asyncio.run(answered([b"HTTP/1.1 104 Upload Resumption Supported\r\n" + framing + final])).answer
    assert found.is_broken or found.body == b"{}"
