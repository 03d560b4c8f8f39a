"""Records as they lie on disk, and what of the machine is in them."""

from __future__ import annotations

import platform

import msgspec
import pytest

from benchmarks.overhead.records import (
    Durations,
    LoadResult,
    Machine,
    OverheadRun,
    RowRecord,
    Stats,
    cpu_model,
    decode,
    encode,
    this_machine,
)
from ppd.proxy.errors import FormatError

LOAD = LoadResult(1.0, 9, 5, 1, 2, 3, 4, first=Durations(5, 1.0, 2.0, 3.0, 4.0), statuses={503: 2, 0: 1})
RUN = OverheadRun(
    date="2026-01-01",
    seconds=2.0,
    repetitions=2,
    machine=Machine("a core", 2, 8, "6.1", "3.11"),
    versions={"ppd": "1", "smg": "2"},
    ppd_args=("--data-plane", "asgi"),
    took_s=1.5,
    records=(
        RowRecord(row="c=1", subject="ppd", repetition=0, load=LOAD, backend=Stats(requests=3), cpu_s=0.5),
        RowRecord(row="c=1", subject="smg", repetition=1, problem='says "no" ]'),
    ),
)


def test_records_are_read_as_they_were_written_one_a_line() -> None:
    data = encode(RUN)
    assert decode(data) == RUN
    assert [line[:7] for line in data.splitlines()[1:3]] == [b'{"row":', b'{"row":']


@pytest.mark.parametrize("change", [(b'"version":1', b'"version":2'), (b'"took_s":1.5,', b"")])
def test_records_of_another_version_are_refused(change: tuple[bytes, bytes]) -> None:
    with pytest.raises(FormatError, match="proxy's overhead"):
        decode(encode(RUN).replace(*change))


def test_faults_are_all_that_a_client_would_not_have_wanted() -> None:
    assert [record.faults for record in RUN.records] == [10, 0]
    assert LOAD.faults == {"503": 2, "0": 1, "connection refused": 1, "broken off": 2, "wrong answer": 4}


def test_what_the_backend_counted_is_counted_from_before() -> None:
    assert Stats(requests=5, prefills=3).since(Stats(requests=2, prefills=3)) == Stats(requests=3)


def test_a_machine_is_told_by_its_cpu_and_never_by_its_name() -> None:
    assert cpu_model("processor\t: 0\nmodel name\t: EPYC 9:1\nmodel name\t: other\n") == "EPYC 9:1"
    assert cpu_model("processor : 0\n") == platform.machine()
    assert platform.node() not in msgspec.json.encode(this_machine()).decode().split('"')
