"""Each format's rows as conversations, on the samples in tests/data/traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppd.offline.traces.formats import read
from ppd.offline.traces.turns import Blocks, Message, TracedConversation, TracedTurn

SAMPLES = Path(__file__).parents[2] / "data" / "traces"


def sample(name: str) -> list[TracedConversation]:
    return read(SAMPLES / name)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("mooncake.jsonl", [[(1100, 50), (450, 20), (480, 1)], [(700, 9)], [(1300, 10)]]),
        ("bailian.jsonl", [[(40, 10), (20, 12)], [(30, 5)]]),
        ("weka.jsonl", [[(640, 100), (60, 40), (300, 30)], [(100, 10)]]),
        ("tracelab.jsonl", [[(1000, 40), (160, 30)], [(500, 20)]]),
        ("burstgpt.csv", [[(472, 18), (110, 230), (90, 10)], [(100, 20)]]),
        ("aiperf_sessions.jsonl", [[(1485, 317), (508, 496), (3504, 347)], [(None, 5)]]),
        ("azure_relative.csv", [[(374, 44)], [(396, 109)]]),
    ],
)
def test_turns_say_what_they_add_to_the_history(name: str, lengths: list[list[tuple[int | None, int]]]) -> None:
    assert [[(turn.new_tokens, turn.output_tokens) for turn in one.turns] for one in sample(name)] == lengths


@pytest.mark.parametrize(
    ("name", "arrivals"),
    [
        ("mooncake.jsonl", [0.0, 2.0, 3.0]),
        ("bailian.jsonl", [61.0, 72.0]),
        ("tracelab.jsonl", [0.0, 60.0]),
        ("burstgpt.csv", [0.0, 40.0]),
        ("aiperf_sessions.jsonl", [0.5, 1.0]),
        ("azure_2023.csv", [0.0, 1.0, 2.5]),
        ("weka.jsonl", [None, None]),
        ("sharegpt.json", [None, None]),
    ],
)
def test_arrivals_are_seconds_whatever_the_file_counts(name: str, arrivals: list[float | None]) -> None:
    assert [one.arrival_s for one in sample(name)] == arrivals


def test_a_session_arrives_with_its_first_round_wherever_that_stands_in_the_file(tmp_path: Path) -> None:
    def row(session: str, index: int, second: int) -> str:
        sent = {"event_type": "user_message", "timestamp": f"2026-01-01T00:00:{second:02d}Z"}
        counts = {"input_tokens_total": 100 * (index + 1), "output_tokens": 5}
        return json.dumps({"session_id": session, "round_index": index, "timing_events": [sent]} | counts)

    path = tmp_path / "trace"
    path.write_text("\n".join((row("a", 1, 30), row("a", 0, 10), row("b", 0, 5))))
    assert [(one.name, one.arrival_s) for one in read(path)] == [("a", 5.0), ("b", 0.0)]


@pytest.mark.parametrize(
    ("name", "pauses"),
    [
        ("mooncake.jsonl", [(0.0, 0.0), (0.0, 1.5), (0.0, 2.5)]),
        ("bailian.jsonl", [(0.0, 0.0), (0.0, 10.5)]),
        ("weka.jsonl", [(0.0, 0.0), (3.5, 0.0), (2.0, 0.0)]),
        ("tracelab.jsonl", [(0.0, 0.0), (7.5, 0.0)]),  # from the answer to the last of two tools' results
        ("burstgpt.csv", [(0.0, 0.0), (0.0, 113.0), (0.0, 12.0)]),
        ("aiperf_sessions.jsonl", [(0.0, 0.0), (10.0, 0.0), (9.0, 0.0)]),
        ("aiperf_multi_turn.jsonl", [(0.0, 0.0), (0.2, 0.0)]),
    ],
)
def test_pauses_are_from_the_answer_or_from_the_request_before(name: str, pauses: list[tuple[float, float]]) -> None:
    assert [(turn.think_s, turn.gap_s) for turn in sample(name)[0].turns] == pauses


def test_first_prompts_keep_the_blocks_that_conversations_share() -> None:
    blocks = [one.turns[0].blocks for one in sample("mooncake.jsonl")]
    assert blocks == [Blocks((0, 1, 2), 512), Blocks((0, 7), 512), Blocks((0, 1, 9), 512)]
    assert all(turn.blocks is None for turn in sample("mooncake.jsonl")[0].turns[1:])


def test_block_ids_of_a_local_scope_mean_nothing_elsewhere() -> None:
    first, second = (one.turns[0].blocks for one in sample("weka.jsonl"))
    assert first == Blocks(tuple(range(1, 11)), 64, "trace_1")
    assert second == Blocks((1, 2), 64, "trace_2")


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("mooncake.jsonl", [((0, 3),), ((0, 2), (3, 2)), ((0, 2), (3, 1), (5, 2))]),
        ("weka.jsonl", [((1, 10),), ((1, 10), (20, 3)), ((1, 2), (40, 3))]),
    ],
)
def test_every_prompt_keeps_its_blocks_as_runs_of_ids(name: str, runs: list[tuple[tuple[int, int], ...]]) -> None:
    prompts = [turn.prompt for turn in sample(name)[0].turns]
    assert [one.runs for one in prompts if one is not None] == runs
    assert [one.tokens for one in prompts if one is not None] == TOKENS[name]


TOKENS = {"mooncake.jsonl": [1100, 1600, 2100], "weka.jsonl": [640, 800, 300]}


@pytest.mark.parametrize(("name", "at"), [("weka.jsonl", 2), ("burstgpt.csv", 2)])
def test_a_prompt_that_lost_its_history_starts_afresh(name: str, at: int) -> None:
    assert [turn.restarts for turn in sample(name)[0].turns] == [index == at for index in range(3)]


def test_both_forms_of_weka_read_alike() -> None:
    (one,) = sample("weka_native.json")
    assert [(turn.new_tokens, turn.output_tokens, turn.think_s) for turn in one.turns] == [
        (130, 20, 0.0),
        (50, 30, 1.5),
    ]


def test_answers_are_kept_and_what_stands_before_them_is_a_turn() -> None:
    first, second = sample("sharegpt.json")
    assert first.turns[1] == TracedTurn(messages=(Message("user", "How far is the moon?"),), reply="About 384,000 km.")
    assert second.turns == (TracedTurn(messages=(Message("user", "And then?"),)),)
    tools = sample("messages.jsonl")[0]
    assert tools.turns[0].messages == (Message("system", "Be brief."), Message("user", "List the files."))
    assert tools.turns[1] == TracedTurn(messages=(Message("tool", "a.txt"),), reply="There is a.txt.")


def test_content_in_parts_is_its_text() -> None:
    assert sample("messages.jsonl")[1].turns[0].messages == (Message("user", "Look:\nwhat is it?"),)


def test_without_any_answer_each_message_is_a_turn() -> None:
    assert [turn.messages[0].content for turn in sample("messages.jsonl")[2].turns] == ["First, do this.", "Then that."]
