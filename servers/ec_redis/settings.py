"""What `ec_connector_extra_config` may say; checked once, when vLLM makes the connector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]
Threads = Annotated[int, msgspec.Meta(ge=1, le=64)]


class ECSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    transport: str = "redis_transport"  # the module whose `connect` makes it: beside this one, or by its whole name
    transport_settings: dict[str, Any] = {}  # of another one than Redis
    redis_url: str = ""  # empty: what $PPD_EC_REDIS_URL says, which vLLM does not log
    name: Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[A-Za-z0-9._:-]*$")] = ""  # empty: vLLM's engine_id
    consumer: str = ""  # of a producer: whom it tells what it encodes, where a request does not say
    max_item_bytes: Annotated[int, msgspec.Meta(ge=1, le=500 << 20)] = 64 << 20  # Redis takes 512 MiB
    reservation_ttl_s: Seconds = 60.0  # for an embedding without a verdict, an offer without a request
    redis_timeout_s: Seconds = 2.0  # of an operation, and the longest that a request waits for embeddings
    send_threads: Threads = 2
    receive_threads: Threads = 2  # for each kind of message
    embedding_width: Annotated[int, msgspec.Meta(ge=0)] = 0  # of a consumer's model; 0: as its config says


def read_settings(extra: Mapping[str, Any]) -> ECSettings:
    """ValueError: names the key, and what is allowed."""
    try:
        return msgspec.convert(dict(extra), ECSettings)
    except msgspec.ValidationError as exc:
        raise ValueError(f"ec_connector_extra_config: {exc}") from exc
