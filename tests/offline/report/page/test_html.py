from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

from ppd.offline.report.page.document import Block, Caution, Document, Picture, Section, Table, Terms, Text
from ppd.offline.report.page.html import page

EVIL = "<img src=x onerror=alert(1)> & \"quotes\" 'too'"
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (1000).to_bytes(4) + (500).to_bytes(4)
PICTURE = Picture(name="p", png=PNG, title="T", message="M", caption="C")
TABLE = Table(caption="C", head=("arm", "n", "why"), rows=[("4R", "3", "few"), ("2P", "4", "")], words=(2,))


class Reader(HTMLParser):
    """Collects the tags with their attributes, and that each is closed in order."""

    VOID = ("meta", "link", "img", "input", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(*blocks: Block) -> str:
    return page(Document("Title", "Lead", (Section("one", "One", blocks), Section("two", "Two", ()))))


def test_every_tag_is_closed_and_every_section_is_in_the_contents() -> None:
    folded = Table(caption="F", head=("a", "b"), rows=[("1", "2")], folded=True)
    reader = Reader(page_of(Text("t"), Caution(("c",)), Terms((("n", "v"),)), TABLE, PICTURE, folded))
    assert reader.open == []
    ids = {attributes["id"] for _, attributes in reader.tags if "id" in attributes}
    assert [a["href"] for a in reader.all("a")] == ["#content", "#one", "#two"]
    assert {"content", "one", "two"} <= ids
    assert len(reader.all("h1")) == 1


def test_text_from_outside_stays_text() -> None:
    table = Table(caption=EVIL, head=(EVIL, EVIL), rows=[(EVIL, EVIL)], folded=True)
    picture = Picture(name="p", png=b"", title=EVIL, message=EVIL, caption=EVIL)
    blocks = (Text(EVIL), Caution((EVIL,)), Terms(((EVIL, EVIL),)), table, picture)
    text = page(Document(EVIL, EVIL, (Section("s", EVIL, blocks),)))
    reader = Reader(text)
    assert len(reader.all("img")) == 1
    assert reader.all("img")[0]["alt"] == f"{EVIL}. {EVIL}"
    assert not any(name.startswith("on") for _, attributes in reader.tags for name in attributes)
    assert reader.words.count(EVIL) == 17


def test_the_page_needs_nothing_else_and_may_ask_for_nothing() -> None:
    text = page_of(PICTURE, TABLE)
    reader = Reader(text)
    sources = [a.get(name) for _, a in reader.tags for name in ("src", "href") if a.get(name) is not None]
    assert all(str(source).startswith(("data:", "#")) for source in sources)
    assert reader.all("img")[0]["src"] == "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert "@import" not in text
    assert "url(" not in text


def test_a_figure_takes_its_place_before_it_is_drawn() -> None:
    (image,) = Reader(page_of(PICTURE)).all("img")
    assert (image["width"], image["height"]) == ("710", "355")


def test_the_policy_names_the_hashes_of_its_own_style_and_script() -> None:
    text = page_of()
    (policy,) = [a["content"] or "" for a in Reader(text).all("meta") if a.get("http-equiv")]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (source,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy


def test_cells_of_a_table_have_headers_with_a_scope() -> None:
    reader = Reader(page_of(TABLE))
    assert [a["scope"] for a in reader.all("th")] == ["col", "col", "col", "row", "row"]
    assert [a.get("class") for a in reader.all("td")] == [None, "words", None, "words"]
    (region,) = [a for a in reader.all("div") if a.get("role") == "region"]
    assert region["aria-labelledby"] == reader.all("caption")[0]["id"]
