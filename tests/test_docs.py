"""What the README and docs/ say is what the code does."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

import pytest

from benchmarks.pages.__main__ import DOCS, LAWS, figure_path, page_path
from benchmarks.pages.goodput import with_goodput
from ppd.offline.cli.main import COMMANDS
from ppd.offline.goodput.modes import NAMES
from ppd.proxy.config.reference import with_tables
from ppd.proxy.failures import ClientGets, HandoffEffect, HealthEffect, OtherLeg, ResidencyEffect, as_markdown
from tests.metric_names import bare, declared, documented
from tests.test_alerts import alert_names

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COVERAGE = (ROOT / "docs" / "coverage.md").read_text()


def test_the_keys_of_the_config_are_those_that_the_proxy_reads() -> None:
    page = DOCS / "configuration.md"
    assert with_tables(page.read_text()) == page.read_text(), f"run: python -m ppd.proxy.config.reference {page}"


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


def test_the_readmes_figures_are_those_of_the_records() -> None:
    recorded = (ROOT / "benchmarks" / "results" / "policies" / "policies.md").read_text()
    rows = re.findall(r"^\| (the best other mode|`\w+`)[^|]* \| ([\d.]+)[^|]* \| ([\d.]+) \|$", README, re.MULTILINE)
    assert len(rows) == 3
    for other, at_98, at_90 in rows:
        name = other.strip("`").replace("other mode", "other of each cell")
        for share, figure in (("0.98", at_98), ("0.9", at_90)):
            assert re.search(rf"^\| traces: {name} \| \d+ \| 25ms@{share} \| {figure} \|", recorded, re.MULTILINE)


def test_links_between_documents_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *DOCS.rglob("*.md"), ROOT / "tables" / "README.md"]:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", document.read_text()):
            path = document.parent / target if target else document
            assert path.exists(), f"{document.name}: {target}"
            assert not anchor or anchor in anchors(path.read_text()), f"{document.name}: {target}#{anchor}"


def anchors(page: str) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_every_mode_has_a_page_with_its_figure(name: str) -> None:
    assert f"](modes/{name}.md)" in (DOCS / "modes.md").read_text()
    page, figure = page_path(name).read_text(), figure_path(name)
    assert f"\n![{name}]({figure.relative_to(DOCS / 'modes')})\n" in page
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert with_goodput(page, name) == page, f"run: python -m benchmarks.pages {name}"


def test_no_page_and_no_figure_is_left_of_a_mode_that_is_gone() -> None:
    kept = {path for name in NAMES for path in (page_path(name), figure_path(name))}
    assert {path for path in (DOCS / "modes").rglob("*.*") if path.is_file()} == kept


def test_the_page_on_the_laws_has_its_figure() -> None:
    figure = figure_path(LAWS)
    assert f"]({figure.relative_to(DOCS)})" in (DOCS / "laws.md").read_text()
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_tests_that_docs_name_exist() -> None:
    known = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = {path.name for path in (ROOT / "tests").rglob("*.py")}
    for test in re.findall(r"`(?:[a-z_]+/)*(\w+\.py)`", COVERAGE):
        assert test in names, test
    for test in re.findall(r"`(test_\w+)`", COVERAGE):
        assert f"def {test}(" in known, test


def test_every_metric_is_documented_with_its_labels_and_every_alert_with_what_to_look_at() -> None:
    page = (DOCS / "metrics.md").read_text()
    assert documented() == declared()
    rows = re.findall(r"^\| (`PPD\w+`(?:, `PPD\w+`)*) \| .+ \|$", page, re.MULTILINE)
    assert sorted(re.findall(r"PPD\w+", " ".join(rows))) == sorted(alert_names())


def test_every_metric_that_a_page_names_exists() -> None:
    known = set(declared())
    for document in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for name, labels in re.findall(r"`(ppd_[a-z_]+)(?:\{([a-z,]*)(?:=[^}]*)?\})?`", document.read_text()):
            assert bare(name) in known, f"{document.name}: {name}"
            assert set(labels.split(",")) - {""} <= documented()[bare(name)], f"{document.name}: {name}"
