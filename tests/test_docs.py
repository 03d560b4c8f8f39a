"""The README's tables say what the code does."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

from ppd.offline.cli.main import COMMANDS
from ppd.proxy.config.reference import with_tables
from ppd.proxy.failures import ClientGets, HandoffEffect, HealthEffect, OtherLeg, ResidencyEffect, as_markdown

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_keys_of_the_config_are_those_that_the_proxy_reads() -> None:
    assert with_tables(README) == README, "run: python -m ppd.proxy.config.reference README.md"


def test_the_failure_table_is_the_one_that_the_proxy_reads() -> None:
    shown = (ROOT / "docs" / "failures.md").read_text()
    assert as_markdown() in shown
    named = re.findall(r"^- \*\*(.+?)\*\*: (.+)$", shown, re.MULTILINE)
    kinds: tuple[type[StrEnum], ...] = (ClientGets, OtherLeg, HandoffEffect, HealthEffect, ResidencyEffect)
    meant = [(kind.name.lower().replace("_", " "), kind.value) for every in kinds for kind in every]
    assert set(named) == {(name, text) for name, text in meant if name not in ("none", "untouched", "unchanged")}


def test_every_command_is_in_the_readme() -> None:
    for name in COMMANDS:
        assert f"`ppd {name}" in README, name


def test_links_between_documents_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "tables" / "README.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
