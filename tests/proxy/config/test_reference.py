"""What readers and editors are told of the keys."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from ppd.proxy.config import KEYS, build
from ppd.proxy.config.reference import as_markdown, json_schema
from ppd.proxy.errors import ConfigError


def fits(document: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(json_schema()).is_valid(document))


def test_every_key_is_described_in_one_row_of_its_group() -> None:
    rows = [line for line in as_markdown().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(KEYS)
    assert all(key.text and key.group for key in KEYS.values())


@pytest.mark.parametrize(
    "text",
    [
        "",
        'mode = "replica"\nx = 0.25\nworkers = ["P=a:1"]\nport = 0',
        "prot = 1",
        'mode = "both"',
        "x = 1.5",
        "port = 70000",
        'port = "7"',
        'host = "a\\u0000b"',
        "attempts = 0",
        "worker_ttl_s = 0",
        'open_paths = ["/admin"]',
        'workers = "P=a:1"',
        "processes = 65",
    ],
)
def test_an_editor_refuses_what_the_proxy_refuses(tmp_path: Path, text: str) -> None:
    file = tmp_path / "ppd.toml"
    file.write_text(text)
    try:
        build(file, {})
        taken = True
    except ConfigError:
        taken = False
    assert fits(tomllib.loads(text)) is taken


def test_the_schema_explains_each_key_with_its_default() -> None:
    shapes = json_schema()["properties"]
    assert set(shapes) == set(KEYS)
    for name, shape in shapes.items():
        assert shape["description"] == KEYS[name].text
        assert "default" in shape
    assert fits(json.loads(json.dumps({name: shape["default"] for name, shape in shapes.items()})))
