"""What the README says of shells: click's own completion, which our lazily imported commands must not break."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.shell_completion import BashComplete, ShellComplete, get_completion_class

from ppd.offline.cli.main import main

README = (Path(__file__).parents[3] / "README.md").read_text()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_readmes_line_asks_for_a_script_that_click_has(shell: str) -> None:
    assert f"_PPD_COMPLETE={shell}_source ppd" in README
    found = get_completion_class(shell)
    assert found is not None and issubclass(found, ShellComplete)
    made = found(main, {}, "ppd", "_PPD_COMPLETE")
    assert "_PPD_COMPLETE" in made.source_template % made.source_vars()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], {"serve", "up", "demo", "agent", "keys", "doctor", "bench"}),
        (["demo", "--"], {"--port", "--once", "--engine"}),
        (["agent", "--role", ""], {"P", "D", "R"}),
        (["keys", ""], {"new", "list", "curve"}),
    ],
)
def test_commands_flags_and_choices_are_completed(words: list[str], wanted: set[str]) -> None:
    *args, last = words or [""]
    completed = BashComplete(main, {}, "ppd", "_PPD_COMPLETE").get_completions(args, last)
    assert wanted <= {item.value for item in completed}


def test_the_programs_are_named_as_their_variables_are() -> None:
    scripts = re.findall(r"^(ppd[\w-]*) = ", (Path(__file__).parents[3] / "pyproject.toml").read_text(), re.M)
    assert {f"_{name.upper().replace('-', '_')}_COMPLETE" for name in scripts} <= set(re.findall(r"_PPD\w+", README))
