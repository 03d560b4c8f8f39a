"""The fuzzer's targets: every seed, and some seconds of what grows from the seeds."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import SEEDS, TARGETS
from tests.support.fake_connections import answered

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
