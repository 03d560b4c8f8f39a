"""Which headers of a worker's answer a client gets."""

from __future__ import annotations

import pytest

from ppd.proxy.config import ProxyConfig
from ppd.proxy.errors import ConfigError
from ppd.proxy.upstream.relayed_headers import RelayedHeaders

DEFAULT = ProxyConfig().relay_headers
ADDRESS = "10.1.2.3:8000"


@pytest.mark.parametrize(
    ("patterns", "name", "value", "passes"),
    [
        (DEFAULT, "endpoint-load-metrics", "JSON {}", True),
        (DEFAULT, "endpoint-load-metrics-more", "x", True),
        (DEFAULT, "x-ratelimit-remaining-tokens", "5", True),
        (DEFAULT, "server-timing", "gpu;dur=5", True),
        (DEFAULT, "server-timings", "x", False),
        (DEFAULT, "x-request-id", "x", False),
        (DEFAULT, "server-timing", "p;desc=10.1.2.3:8000", False),
        (DEFAULT, "server-timing", "p;desc=10.1.2.3", False),
        (("co*", "tr*"), "connection", "close", False),
        (("co*", "tr*"), "content-length", "5", False),
        (("co*", "tr*"), "transfer-encoding", "chunked", False),
        (("co*", "tr*"), "cost", "5", True),
        (("x-*",), "x-ppd-route", "LOCAL", False),
        (("x-*",), "x-own", "\u00e9", True),
        ((), "server-timing", "x", False),
    ],
)
def test_what_passes(patterns: tuple[str, ...], name: str, value: str, passes: bool) -> None:
    found = RelayedHeaders(patterns).of({name.encode(): value.encode("latin-1")}, ADDRESS)
    assert found == ({name: value} if passes else {})


@pytest.mark.parametrize("address", ["d1:8000", "localhost:80"])
def test_a_host_that_is_a_word_may_occur(address: str) -> None:
    rules = RelayedHeaders(DEFAULT)
    assert rules.of({b"server-timing": b"d1;dur=5, localhost"}, address) == {"server-timing": "d1;dur=5, localhost"}
    assert rules.of({b"server-timing": address.encode()}, address) == {}


@pytest.mark.parametrize(
    "pattern", ["*", "x*", "X-Own", "x own", "x-*-y", "", "connection", "set-cookie", "x-request-id"]
)
def test_what_can_not_be_chosen_is_told(pattern: str) -> None:
    with pytest.raises(ConfigError, match="relay_headers") as caught:
        RelayedHeaders([pattern])
    assert caught.value.param == "relay_headers"
