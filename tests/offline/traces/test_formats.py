from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from ppd.offline.traces.formats import Format, arrival_times, detect, read
from ppd.proxy.errors import FormatError

SAMPLES = Path(__file__).parents[2] / "data" / "traces"


@pytest.mark.parametrize(
    ("name", "kind", "turns"),
    [
        ("mooncake.jsonl", Format.MOONCAKE, [3, 1, 1]),
        ("bailian.jsonl", Format.BAILIAN, [2, 1]),
        ("weka.jsonl", Format.WEKA, [3, 1]),
        ("weka_native.json", Format.WEKA, [2]),
        ("tracelab.jsonl", Format.TRACELAB, [2, 1]),
        ("azure_2023.csv", Format.AZURE, [1, 1, 1]),
        ("azure_relative.csv", Format.AZURE, [1, 1]),
        ("burstgpt.csv", Format.BURSTGPT, [3, 1]),
        ("aiperf_sessions.jsonl", Format.AIPERF_SESSIONS, [3, 1]),
        ("aiperf_multi_turn.jsonl", Format.AIPERF_MULTI_TURN, [2, 1]),
        ("sharegpt.json", Format.DIALOGUES, [2, 1]),
        ("messages.jsonl", Format.DIALOGUES, [2, 1, 2]),
    ],
)
def test_each_format_is_told_by_its_content(tmp_path: Path, name: str, kind: Format, turns: list[int]) -> None:
    assert detect(SAMPLES / name) is kind
    assert [len(conversation.turns) for conversation in read(SAMPLES / name)] == turns
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress((SAMPLES / name).read_bytes()))
    assert read(packed) == read(SAMPLES / name)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"timestamp": 0, "input_length": 9, "output_length": 1}\n{"timestamp": 1, "input_length": 9}\n', "line 2"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1}\n\n{"timestamp": 1, ', "line 3"),
        ('{"timestamp": 0, "input_length": -9, "output_length": 1}\n', "line 1: Expected `int` >= 0"),
        ("arrival_s,context_tokens,generated_tokens\n0,10,5\n1,ten,5\n", "line 3: context_tokens: must be a number"),
        ("arrival_s,context_tokens,generated_tokens\n0,10\n", "line 2: must have 3 columns, has 2"),
        ("arrival_s,context_tokens,generated_tokens\nnoon,10,5\n", "line 2: arrival_s: must be seconds or a date"),
        ("arrival_s,context_tokens,generated_tokens\n0,10,5\nnan,10,5\n", "line 3: arrival_s: must be seconds"),
        ("arrival_s,context_tokens,generated_tokens\ninf,10,5\n", "line 2: arrival_s: must be seconds or a date"),
        ('[{"messages": [{"role": "user", "content": "a"}]}, {"id": 1}]', "item 2: must have messages or conv"),
        ('{"session_id": "a", "input_length": 5}\n{"session_id": "a", "delay": 5}\n', "line 2: must have input_length"),
        ('{"requests": [{"in": 5}], "block_size": 0, "id": "a"}', "line 1: Expected `int` >= 1"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(FormatError) as raised:
        read(path)
    assert str(path) in raised.value.message
    assert says in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "trace: is empty"),
        (b" \r\n\n", "trace: is empty"),
        (b"\xef\xbb\xbf", "trace: is empty"),
        (b"[]\n", "trace: is empty"),
        (gzip.compress(b"", mtime=0), "trace: is empty"),
        (b"[" * 100_000, "trace: not a JSON list"),
        (b'{"a":' * 100_000, "none of the known formats"),
        (b'{"a": 1}\n', "none of the known formats: mooncake"),
        (b"\xff\xfe\x00", "none of the known formats"),
        (b"a,b,c\n1,2,3\n", "none of the known formats"),
        (b'[{"messages": []}', "not a JSON list"),
        (b'[{"messages": []}]', "holds no conversation"),
        (b'{"id": "a", "block_size": 64, "requests": [{"type": "subagent", "in": 5}]}', "holds no conversation"),
        (b'{"session_id": "a", "turns": []}', "holds no conversation"),
        (gzip.compress(b"x" * 5000, mtime=0)[:30], "not a whole gzip file"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=says):
        read(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"nowhere.*No such file"):
        read(tmp_path / "nowhere")


def test_arrivals_are_those_of_conversations_in_order() -> None:
    assert arrival_times(SAMPLES / "mooncake.jsonl") == [0.0, 2.0, 3.0]
    assert arrival_times(SAMPLES / "azure_2023.csv") == [0.0, 1.0, 2.5]
    assert arrival_times(SAMPLES / "burstgpt.csv") == [0.0, 40.0]


def test_a_trace_without_times_has_no_arrivals() -> None:
    with pytest.raises(FormatError, match="does not say when its conversations arrive"):
        arrival_times(SAMPLES / "weka.jsonl")
