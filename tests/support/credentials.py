"""Keys of clients, each made of its client's name, and certificates of a test's own authority, by openssl."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Certificate:
    cert: str
    key: str


class Authority:
    """Files in `folder`: `ca` is the authority's certificate."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._own = self._request(name, "-x509", "-addext", "keyUsage=critical,keyCertSign")
        self.ca = self._own.cert

    def issue(self, name: str, host: str = "127.0.0.1", *, password: str = "", key: str = "ec") -> Certificate:
        """For the IP address `host`, valid for a day; key: of which kind, as openssl names it."""
        signed = ("-CA", self._own.cert, "-CAkey", self._own.key, "-addext", f"subjectAltName=IP:{host}")
        leaf = ("-addext", "basicConstraints=critical,CA:FALSE", "-addext", "keyUsage=critical,digitalSignature")
        return self._request(name, "-x509", *signed, *leaf, password=password, key=key)

    def _request(self, name: str, *options: str, password: str = "", key: str = "ec") -> Certificate:
        made = Certificate(str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key"))
        secret = ("-passout", f"pass:{password}") if password else ("-nodes",)
        curve = ("-pkeyopt", "ec_paramgen_curve:prime256v1") if key == "ec" else ()
        new_key = ("-newkey", key, *curve, "-keyout", made.key, *secret)
        subject = ("-subj", f"/CN={name}", "-days", "1", "-out", made.cert)
        command = ["openssl", "req", *new_key, *subject, *options]
        subprocess.run(command, check=True, capture_output=True)
        return made


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.ca)
