"""The README's tables say what the code does."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from enum import StrEnum
from pathlib import Path

from ppd.offline.cli.main import COMMANDS
from ppd.proxy.config import LIVE, ProxyConfig
from ppd.proxy.failures import ClientGets, HandoffEffect, HealthEffect, OtherLeg, ResidencyEffect, as_markdown

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def documented() -> dict[str, tuple[str, bool]]:
    """Key -> its default as the README writes it, and whether it is marked as live."""
    section = README.partition("## Configuration")[2].partition("\n## ")[0]
    found: dict[str, tuple[str, bool]] = {}
    for row in re.findall(r"^\| (`.+)$", section, re.M):
        names, defaults = row.split(" | ")[:2]
        keys, values = re.findall(r"`(\w+)`", names), re.findall(r"`([^`]*)`", defaults)
        found |= {key: (value, names.endswith("*")) for key, value in zip(keys, values, strict=True)}
    return found


def test_every_setting_is_in_the_reference_with_its_default() -> None:
    shown = documented()
    assert set(shown) == {field.name for field in fields(ProxyConfig)}
    for field in fields(ProxyConfig):
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        assert shown[field.name][0] == json.dumps(default), field.name


def test_what_takes_effect_without_a_restart_is_marked() -> None:
    assert {key for key, (_, is_live) in documented().items() if is_live} == LIVE


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
