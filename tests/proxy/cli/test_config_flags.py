"""The flags of `ppd serve`: their help, and what they complete to."""

from __future__ import annotations

import json

from click.shell_completion import ShellComplete
from click.testing import CliRunner

from ppd.proxy.cli.serve import command
from ppd.proxy.config import KEYS, SECRET

HELP = CliRunner().invoke(command, ["--help"], env={f"PPD_{name.upper()}": "hidden-key" for name in SECRET}).output


def test_help_tells_each_flag_under_its_group_and_no_secret() -> None:
    words = " ".join(HELP.split())
    places = [HELP.index(f"\n{group}:\n") for group in dict.fromkeys(key.group for key in KEYS.values())]
    assert places == sorted(places)
    for key in KEYS.values():
        assert f"\n  --{key.name.replace('_', '-')} " in HELP
        # Lines break at hyphens too.
        assert key.text.replace("`", "")[1:].replace("-", "").replace(" ", "") in words.replace("-", "").replace(
            " ", ""
        )
    assert "[default: 10001]" in words
    assert "hidden-key" not in HELP


def test_the_schema_is_printed_and_nothing_else_is_done() -> None:
    result = CliRunner().invoke(command, ["--schema", "--port", "none"])
    assert result.exit_code == 0
    assert json.loads(result.output)["properties"].keys() == KEYS.keys()


def test_all_wrong_flags_are_told_at_once() -> None:
    result = CliRunner().invoke(command, ["--port", "x", "--mode", "both", "--w-ttft", "nan"])
    assert result.exit_code == 1
    assert [f"\n  {name} = " in result.output for name in ("port", "mode", "w_ttft")] == [True] * 3


def test_a_choice_completes_to_its_values() -> None:
    found = ShellComplete(command, {}, "ppd serve", "_PPD_COMPLETE").get_completions(["--mode"], "always")
    assert [item.value for item in found] == ["always_local", "always_split"]
