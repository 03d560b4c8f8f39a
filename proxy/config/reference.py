"""What the keys are, for readers: the tables of docs/configuration.md, and a JSON Schema for editors.

    python -m ppd.proxy.config.reference docs/configuration.md

writes the tables between the page's markers.
"""

from __future__ import annotations

import json
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from .key import Key
from .keys import KEYS, ProxyConfig

BEGIN, END = "<!-- keys of the config -->\n", "<!-- end of the keys -->\n"


def as_markdown() -> str:
    """A table for each group; * marks the live keys."""
    parts = []
    for group, keys in groupby(KEYS.values(), lambda key: key.group):
        parts.append(f"**{group}**\n\n| key | default | what |\n|---|---|---|\n" + "".join(map(_row, keys)))
    return "\n".join(parts)


def _row(key: Key) -> str:
    default = json.dumps(msgspec.to_builtins(key.default))
    text = key.text + (f"; one of {', '.join(f'`{one}`' for one in key.choices)}" if _hides_choices(key) else "")
    text = re.sub(r"\bdocs/([\w-]+\.md)\b", r"[\1](\1)", text.replace("|", r"\|"))
    text = re.sub(r"\btables/[\w-]+\.md\b", r"[\g<0>](../\g<0>)", text)
    return f"| `{key.name}`{' *' if key.is_live else ''} | `{default}` | {text} |\n"


def _hides_choices(key: Key) -> bool:
    return any(choice not in key.text for choice in key.choices)


def with_tables(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{as_markdown()}\n{END}{rest.partition(END)[2]}"


def json_schema() -> dict[str, Any]:
    """Of the TOML file. Editors show its descriptions, and mark what is not allowed."""
    (schema,), parts = msgspec.json.schema_components([ProxyConfig], ref_template="#/$defs/{name}")
    described = parts.pop(ProxyConfig.__name__)
    for name, shape in described["properties"].items():
        shape["description"] = KEYS[name].text
    assert schema, "a reference to what is described here"
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **described,
        "title": "Config of ppd serve",
        "description": "The TOML file of `ppd serve --config`.",
        "additionalProperties": False,
        "$defs": parts,
    }


def main() -> None:
    page = Path(sys.argv[1])
    page.write_text(with_tables(page.read_text()))


if __name__ == "__main__":
    main()
