"""Workers for the connectors' tests, and P's answer to a prefill leg as vLLM 0.33 writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from ppd.proxy.connectors.leg import Pair
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.openai.request import Fields


@pytest.fixture
def make_pair() -> Callable[..., Pair]:
    def make(
        address: str = "10.0.0.5:8100",
        version: str = "0.33.0",
        connector: str = "nixl",
        key: str = "",
        of_prefill: Mapping[str, str] = MappingProxyType({}),
        of_decode: Mapping[str, str] = MappingProxyType({}),
    ) -> Pair:
        prefill = Worker(
            role=Role.PREFILL,
            address=address,
            connector=connector,
            coordinates=dict(of_prefill),
            engine_version=version,
        )
        decode = Worker(
            role=Role.DECODE,
            address="10.0.0.9:8200",
            connector=connector,
            coordinates=dict(of_decode),
            engine_version=version,
        )
        return Pair(prefill, decode, key)

    return make


@pytest.fixture
def fields_of() -> Callable[[dict[str, Any]], Fields]:
    def fields_of(body: dict[str, Any]) -> Fields:
        return msgspec.json.decode(msgspec.json.encode(body), type=Fields)

    return fields_of
