from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ppd.offline.cli.bench import command

URL = ("--url", "http://127.0.0.1:1")
SAMPLES = Path(__file__).parents[2] / "data" / "traces"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "qps, concurrency: one of them is needed"),
        (("--qps", "1", "--concurrency", "2"), "qps, concurrency: give one of them"),
        (("--trace", "weka.jsonl", "--conversations", "weka.jsonl"), "conversations, trace: give one of them"),
        (("--qps", "1", "--first", "128"), "'128': must be two counts of tokens such as 128:64"),
        (("--qps", "1", "--later", "0:5"), "'0:5': must be two counts"),
        (("--qps", "1", "--later", "5:" + "9" * 5000), "9': must be two counts"),
        (("--qps", "0"), "Invalid value for '--qps'"),
        (("--qps", "inf"), "Invalid value for '--qps': inf is not a finite number"),
        (("--qps", "1", "--think", "inf"), "Invalid value for '--think': inf is not a finite number"),
        (("--qps", "1", "--shared-prefix", "128"), "shared_prefix: must be below the 128 tokens"),
        (("--qps", "1", "--session-header", "a b"), "session_header: must be a header's name"),
        (("--trace", "README.md"), "is in none of the known formats"),
        (("--qps", "1", "--plain", "--endpoint", "completions"), "plain: goes with the chat endpoint only"),
        (("--qps", "1", "--out", "weka.jsonl/records"), "weka.jsonl/records: cannot be written"),
        (("--qps", "1"), "http://127.0.0.1:1 does not list its models: Connection refused"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    flags: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(SAMPLES)
    result = CliRunner().invoke(command, [*URL, *flags])
    assert result.exit_code in (1, 2)
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_help_names_the_formats_and_hides_no_flag() -> None:
    shown = CliRunner().invoke(command, ["--help"]).stdout
    for word in ("Mooncake", "BurstGPT", "--qps", "--concurrency", "--speed", "--session-header", "--output"):
        assert word in shown
