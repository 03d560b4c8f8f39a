"""What the demo looks at before it starts anything."""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ppd.servers.cli.demo import command, out_of_the_way
from ppd.servers.cli.up import with_topology


def test_without_its_client_the_demo_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    said = CliRunner().invoke(command, [])
    assert said.exit_code == 1
    assert said.output.splitlines() == [
        "Error: the demo plays its conversation with OpenAI's client: pip install openai"
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        ([], False),
        (["--port", "10002"], False),
        (["--heartbeat-port", "30001", "--port-offset", "0"], True),  # asked for: a taken one is an error
    ],
)
def test_a_second_demo_needs_another_port_for_its_clients_only(argv: list[str], kept: bool) -> None:
    with socket.socket() as first, command.make_context("demo", argv) as context:
        with contextlib.suppress(OSError):  # another program has it already
            first.bind(("127.0.0.1", 30001))
            first.listen()
        flags = out_of_the_way(with_topology(context.params))
        assert (flags["heartbeat_port"] == 30001) is kept
        assert flags["port"] == context.params["port"]
