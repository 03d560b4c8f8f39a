"""The table of a bad network, and the words by which netem is asked for one."""

from __future__ import annotations

import pytest

from benchmarks.network import __main__ as network
from benchmarks.network.fault_link import Conditions
from benchmarks.network.namespaces import netem
from benchmarks.network.report import NetworkResult, markdown, wrong
from benchmarks.soak.records import ClientOutcome, RequestRecord


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        (Conditions(), ""),
        (Conditions(latency_s=0.005), "delay 5ms"),
        (Conditions(latency_s=0.05, jitter_s=0.02), "delay 60ms 10ms"),
        (Conditions(loss=0.01), "loss 1%"),
        (Conditions(latency_s=0.0005, loss=0.05), "delay 0.5ms loss 5%"),
        (Conditions(bandwidth_bps=125_000), "rate 1000000bit"),
    ],
)
def test_conditions_in_netems_words(conditions: Conditions, words: str) -> None:
    assert " ".join(netem(conditions)) == words


def request(outcome: ClientOutcome, first_text_s: float | None = 1.5, *, stream: bool = True) -> RequestRecord:
    return RequestRecord(
        id="",
        conversation=0,
        endpoint="chat",
        move="open",
        stream=stream,
        sent_s=1.0,
        first_text_s=first_text_s,
        ended_s=2.0,
        status=200,
        outcome=outcome,
        route="LOCAL",
        detail="",
    )


def cells(*requests: RequestRecord) -> list[str]:
    table = markdown([NetworkResult(trial="rain", made_by="netem", retries=3, requests=list(requests))])
    return [cell.strip() for cell in table.splitlines()[2].split("|")[1:-1]]


def test_a_row_counts_what_clients_saw() -> None:
    outcomes = [
        ClientOutcome.COMPLETED,
        ClientOutcome.LEFT,
        ClientOutcome.BROKEN,
        ClientOutcome.FAILED,
        ClientOutcome.WRONG,
        ClientOutcome.UNMARKED,
    ]
    found = [request(outcome) for outcome in (*outcomes, ClientOutcome.COMPLETED, ClientOutcome.REJECTED)]
    assert cells(*found) == ["rain", "netem", "8", "50.0%", "1", "2", "500 ms", "500 ms", "500 ms", "3"]


def test_first_text_is_timed_in_completed_streams_only() -> None:
    late = [request(ClientOutcome.BROKEN, 9.0), request(ClientOutcome.COMPLETED, 9.0, stream=False)]
    assert cells(request(ClientOutcome.COMPLETED, 1.1), request(ClientOutcome.COMPLETED, 1.3), *late)[6:9] == [
        "200 ms",
        "298 ms",
        "300 ms",
    ]


def test_a_row_without_answers_has_no_times() -> None:
    assert cells()[2:] == ["0", "none", "0", "0", "none", "none", "none", "3"]


def test_half_an_answer_that_passes_for_a_whole_one_is_wrong() -> None:
    counts = [
        wrong(NetworkResult(trial="", made_by="", retries=0, requests=[request(outcome)]))
        for outcome in (
            ClientOutcome.WRONG,
            ClientOutcome.UNMARKED,
            ClientOutcome.BROKEN,
            ClientOutcome.UNANSWERED,
            ClientOutcome.COMPLETED,
        )
    ]
    assert counts == [1, 1, 0, 0, 0]


def test_every_trial_has_a_name_of_its_own_and_the_first_is_the_good_network() -> None:
    assert len({trial.name for trial in network.TRIALS}) == len(network.TRIALS)
    assert (network.TRIALS[0].conditions, network.TRIALS[0].partition_s, network.TRIALS[0].resets_every_s) == (
        Conditions(),
        0,
        0,
    )


def test_help_is_told() -> None:
    assert "5 % loss" in network.parser().format_help()
