"""The endpoint that is measured, and how it is asked."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from ppd.proxy.errors import ConfigError

_HEADER = re.compile(r"[A-Za-z0-9_-]+")


class Api(StrEnum):
    """How prompts are sent.

    COMPLETIONS sends token ids and continues with the ids of the answer, so counts are exact and the prefix cache finds
    every block. It needs vLLM's `return_token_ids`. CHAT sends text, as users do. Where an answer's text tokenizes to
    other tokens than were generated, the next prompt has another length and misses the cache.
    """

    CHAT = "chat"
    COMPLETIONS = "completions"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Api.CHAT else "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    url: str  # without /v1
    model: str
    api: Api = Api.COMPLETIONS
    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)
    plain: bool = False  # only parameters of OpenAI's own API are sent, so answers may be shorter than asked
    forces_routes: bool = False  # asks the proxy for each turn's planned route; needs the admin key
    timeout_s: float = 600.0  # of a whole answer
    tokenizer: Path | None = None  # a folder in Hugging Face's layout; None: the endpoint's /tokenize is asked
    session_header: str = ""  # the header that names a conversation; empty: none is sent
    name_prefix: str = "ppd"  # of the conversations' names
    connections: int | None = None  # at once; None: no limit, as an open loop needs

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url: must start with http:// or https://, got {self.url!r}", param="url")
        if not _has_host(self.url):
            raise ConfigError(
                f"url: must name a host, and if any a port from 1 to 65535, got {self.url!r}", param="url"
            )
        if self.forces_routes and not self.admin_key:
            raise ConfigError("admin_key: is needed to force routes", param="admin_key")
        if self.session_header and not _HEADER.fullmatch(self.session_header):
            raise ConfigError(f"session_header: must be a header's name, got {self.session_header!r}")
        if self.timeout_s <= 0:
            raise ConfigError(f"timeout_s: must be positive, got {self.timeout_s}", param="timeout_s")
        if self.connections is not None and self.connections < 1:
            raise ConfigError(f"connections: must be at least 1, got {self.connections}", param="connections")

    def at(self, path: str) -> str:
        return self.url.rstrip("/") + path

    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # of the port, or of an IPv6 address
        return False
