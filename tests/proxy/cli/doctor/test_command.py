"""The doctor's command line: what it takes, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from ppd.proxy.cli.doctor.command import command, proxy_origin

GOOD = "port = 0\nheartbeat_port = 0\nadmin_key = 's3cret'\n"


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(command, list(arguments))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "ppd.toml"
    file.write_text(GOOD)
    return file


def test_a_good_config(config: Path) -> None:
    result = run("--config", str(config))
    assert result.exit_code == 0, result.output
    shown = [line.split() for line in result.output.splitlines() if line]
    assert [(line[1], line[2]) for line in shown[:-1]] == [
        ("OK", "config"),
        ("SKIP", "port"),
        ("SKIP", "heartbeat_port"),
        ("OK", "table"),
        ("OK", "admin"),
        ("OK", "data"),
        ("SKIP", "workers"),
    ]
    assert "s3cret" not in result.output


def test_a_bad_config_fails_and_names_the_key(config: Path) -> None:
    config.write_text(GOOD + "attempts = 0")
    result = run("--config", str(config), "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert [(finding["level"], finding["check"]) for finding in document["findings"]] == [("FAIL", "config")]
    assert "attempts = 0" in document["findings"][0]["message"]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--config", "{config}", "--proxy", "http://h:1"),
        ("--config", "{config}.absent"),
        ("--config", "{config}", "--model", "m"),
        ("--proxy", "ftp://h:1"),
        ("--proxy", "http://h:port"),
        ("--proxy", "http://h/chat"),
        ("--proxy", "http://[::1"),
    ],
)
def test_wrong_command_lines_exit_with_2(arguments: tuple[str, ...], config: Path) -> None:
    assert run(*(text.format(config=config) for text in arguments)).exit_code == 2


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("http://127.0.0.1:10001", "http://127.0.0.1:10001"),
        ("127.0.0.1:10001", "http://127.0.0.1:10001"),
        ("https://proxy.example/v1/", "https://proxy.example"),
        ("http://[::1]:7", "http://[::1]:7"),
    ],
)
def test_proxy_is_taken_in_every_usual_form(text: str, origin: str) -> None:
    assert proxy_origin(text) == origin


def test_a_path_is_not_taken_for_a_proxy() -> None:
    with pytest.raises(click.UsageError):
        proxy_origin("http://h:1/admin")
