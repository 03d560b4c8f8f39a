"""Key files for tests: a client's key is made of its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppd.proxy.admission.keys import Client, encode, hash_of


def key_of(name: str) -> str:
    return "ppd_" + f"{name}-".ljust(43, "k")


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key_of(name)}"}


def client(name: str, **members: Any) -> Client:
    return Client(**({"name": name, "tenant": name} | members))


def write_keys(file: Path, *clients: Client) -> str:
    """The file's name, for `keys_file`."""
    file.write_text("".join(encode(one, hash_of(key_of(one.name))) for one in clients))
    return str(file)
