"""A report in a real browser: headless Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppd.offline.report.write import write_published_report
from tests.support.chromium import tab

ROWS = Path(__file__).parents[3] / "tables" / "source" / "ppd-h100-grid.csv.gz"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published_report(ROWS, tmp_path_factory.mktemp("report"))


async def test_the_page_shows_all_of_itself_and_asks_for_nothing(report: Path, tmp_path: Path) -> None:
    async with tab(tmp_path / "profile") as page:
        await page.open(report.as_uri())
        widths = await page.value("Promise.all([...document.images].map(i => i.decode().then(() => i.naturalWidth)))")
        assert len(widths) == len(list(report.parent.glob("*.png")))
        assert all(width >= 900 for width in widths)
        assert not await page.value("[...document.images].some(image => image.alt.length < 40)")

        headings = await page.value("[...document.querySelectorAll('h1, main h2')].map(heading => heading.innerText)")
        contents = await page.value("[...document.querySelectorAll('nav a')].map(link => link.innerText)")
        assert headings == ["The published PPD measurements", *contents]
        assert "Which mode wins" in contents
        dangling = (
            "[...document.querySelectorAll('nav a')].filter(a => !document.querySelector(a.getAttribute('href')))"
        )
        assert await page.value(f"{dangling}.length") == 0

        assert {url.split(":")[0] for url in page.requests} == {"file", "data"}
        assert [url for url in page.requests if url.startswith("file")] == [report.as_uri()]
        assert page.complaints == []


async def test_rows_are_filtered_by_every_word(report: Path, tmp_path: Path) -> None:
    async with tab(tmp_path / "profile") as page:
        await page.open(report.as_uri())
        assert await page.value("document.querySelector('output').textContent") == "1260 of 1260 rows"
        await page.value(
            "{ const field = document.querySelector('input'); field.value = '4R SMALL_tiny';"
            " field.dispatchEvent(new Event('input')); }"
        )
        assert await page.value("document.querySelector('output').textContent") == "10 of 1260 rows"
        await page.value("document.querySelector('details').open = true")
        shown = "[...document.querySelectorAll('details tbody tr')].filter(row => row.offsetHeight > 0)"
        rows = await page.value(f"{shown}.map(row => row.innerText)")
        assert len(rows) == 10
        assert all(row.startswith("4R") and "small_tiny" in row for row in rows)
        assert page.complaints == []


async def test_the_page_fits_a_narrow_screen_and_follows_the_dark(report: Path, tmp_path: Path) -> None:
    async with tab(tmp_path / "profile") as page:
        await page.call("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=True)
        await page.open(report.as_uri())
        await page.value("document.querySelector('details').open = true")
        assert await page.value("document.documentElement.scrollWidth") == 400
        assert await page.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        assert await page.value("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
        assert page.complaints == []
