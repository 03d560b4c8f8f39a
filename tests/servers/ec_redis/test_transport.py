"""Which transport the settings name, and what each makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.servers.ec_redis.redis_transport import connect as connect_redis
from ppd.servers.ec_redis.settings import ECSettings
from ppd.servers.ec_redis.transport import connect


def test_another_transport_is_another_module() -> None:
    settings = ECSettings(transport=f"{__package__}.in_memory", transport_settings={"room": "a"})
    one, other = connect(settings, "E1", 10), connect(settings, "PD1", 10)
    one.send_metadata("PD1", b"m")
    other.send_verdict("E1", b"v")
    one.send_data("PD1", b"d")
    one.send_data("PD1", b"more than is taken")
    assert (other.receive_metadata(), one.receive_verdict(), other.receive_data()) == (b"m", b"v", b"d")
    assert (one.receive_metadata(), other.receive_data()) == (None, None)


@pytest.mark.parametrize("module", ["", "no.such.module", ".relative", "ppd.servers.ec_redis.wire"])
def test_what_is_no_transport_is_named(module: str) -> None:
    with pytest.raises(ValueError, match=r"ec_connector_extra_config: transport: .* must be a module that has"):
        connect(ECSettings(transport=module), "E1", 10)


@pytest.mark.parametrize(
    ("settings", "environ", "address"),
    [
        ({"redis_url": "redis://one:1"}, {"PPD_EC_REDIS_URL": "redis://other:2"}, "one:1"),
        ({}, {"PPD_EC_REDIS_URL": "redis://u:p@other:2/3"}, "other:2"),
    ],
)
def test_redis_is_where_the_settings_say_or_else_the_environment(
    settings: dict[str, Any], environ: dict[str, str], address: str
) -> None:
    assert connect_redis(ECSettings(**settings), "E1", 10, environ).address == address


@pytest.mark.parametrize(
    ("url", "why"), [("", "redis_url is missing, and PPD_EC_REDIS_URL is not set"), ("http://x", "redis_url must be")]
)
def test_without_a_url_of_redis_there_is_none(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        connect_redis(ECSettings(redis_url=url), "E1", 10, {})
