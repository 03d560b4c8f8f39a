"""Which P a header may name, and which of several is taken."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from ppd.proxy.errors import ConfigError, Forbidden
from ppd.proxy.runtime.watched_files import STILL_IF_SHORTER
from ppd.servers.sidecar.allow_list import Allowed, AllowList
from ppd.servers.sidecar.prefills import HEADER, Prefills


@pytest.mark.parametrize(
    ("entry", "address", "has"),
    [
        ("10.0.0.0/24", "10.0.0.5:8100", True),
        ("10.0.0.0/24", "10.0.1.5:8100", False),
        ("10.0.0.5", "10.0.0.5:1", True),
        ("10.0.0.5:8100", "10.0.0.5:8100", True),
        ("10.0.0.5:8100", "10.0.0.5:8101", False),
        ("0.0.0.0/0", "p.example:8100", False),  # whoever answers for the name could change where it leads
        ("P.example:8100", "p.example:8100", True),
        ("p.example:8100", "p.example.evil:8100", False),
        ("fd00::/8", "[fd00::5]:8100", True),
        ("fd00::/8", "10.0.0.5:8100", False),
        ("10.0.0.0/24", "[::ffff:10.0.0.5]:8100", True),
        ("10.0.0.0/24", "010.0.0.5:8100", False),
        ("10.0.0.0/24", "167772165:8100", False),
    ],
)
def test_a_p_is_allowed_by_its_range_or_by_its_own_address(entry: str, address: str, has: bool) -> None:
    assert Allowed.of([entry]).has(address) == has


def test_without_a_list_no_p_is_allowed() -> None:
    assert AllowList("").allowed == Allowed()


@pytest.mark.parametrize("text", ["10.0.0.6/24", "10.0.0.0/33", "nowhere", "10.0.0.5:0", "a:1,b:x", "/no/such/file"])
def test_what_is_neither_says_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match=r"allow_prefill = .*: must be address ranges .*, or host:port; or a file"):
        AllowList(text)


def changed(file: Path, text: str, at_ns: int) -> None:
    file.write_text(text)
    os.utime(file, ns=(at_ns, at_ns))


def test_a_file_is_read_again_once_it_is_no_longer_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "allowed"
    changed(file, "10.0.0.0/24, p.example:8100  # the first rack\n\n10.0.1.5\n", 1)
    found = AllowList(str(file))
    first = Allowed.of(["10.0.0.0/24", "p.example:8100", "10.0.1.5"])
    assert found.allowed == first
    for number, text in enumerate(("", "10.0.2.0/24\n10.0", "# nothing"), 2):
        changed(file, text, number)
        for _ in range(1 + STILL_IF_SHORTER):
            found.look()
        assert found.allowed == first, "an unusable list changes nothing"
        assert "is not used" in caplog.messages[-1]
    changed(file, "10.0.2.0/24\n" + "# a long history\n" * 10, 9)
    for _ in range(STILL_IF_SHORTER):
        found.look()
        assert found.allowed == first, "the lines that it lacks may still come"
    found.look()
    assert found.allowed == Allowed.of(["10.0.2.0/24"])
    file.unlink()
    found.look()
    found.look()
    assert found.allowed == Allowed.of(["10.0.2.0/24"])


@pytest.mark.parametrize(
    ("text", "why"), [("", "an entry at least"), ("nowhere", "address ranges"), ("1" * 2**20 + "1", "at most 1048576")]
)
def test_a_file_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "allowed"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        AllowList(str(file))


@pytest.mark.parametrize(
    ("header", "samples", "address"),
    [
        (None, False, None),
        (" , ", False, None),
        ("10.0.0.1:1", False, "10.0.0.1:1"),
        ("10.0.0.1:1, 10.0.0.2:2", False, "10.0.0.1:1"),
        ("10.0.0.1:1, 10.0.0.2:2", True, "10.0.0.2:2"),
        ("10.9.0.1:1, 10.0.0.2:2", True, "10.0.0.2:2"),
    ],
)
def test_the_first_p_of_a_header_is_taken_or_any(header: str | None, samples: bool, address: str | None) -> None:
    def last(named: Sequence[str]) -> str:
        return named[-1]

    prefills = Prefills(AllowList("10.0.0.0/24"), connector="nixl", tls=True, samples=samples, choice=last)
    found = prefills.named({} if header is None else {HEADER: header})
    assert (None if found is None else found.worker.address) == address
    assert found is None or found.worker.tls


def test_of_several_the_one_that_is_taken_must_be_allowed() -> None:
    prefills = Prefills(AllowList("10.0.0.0/24"), connector="nixl", tls=False, samples=False)
    with pytest.raises(Forbidden):
        prefills.named({HEADER: "10.9.0.1:1, 10.0.0.2:2"})
