"""What is read from vLLM's configs and from requests' bodies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ppd.servers.ec_redis.reservations import Embedding, Offer
from ppd.servers.ec_redis.settings import ECSettings
from ppd.servers.ec_redis.vllm_objects import consumer_of, engine_name, model_width, read_offers

OFFER = Offer("E1", "leg", "a", Embedding((16, 128), "F32"))
TOLD = {"producer": "E1", "leg": "leg", "item": "a", "embedding": {"shape": [16, 128], "dtype": "F32"}}
NONE: list[Any] = [
    *(None, {}, "x", 7, ["a"], {"a": 7}, {"a": "offer"}, {"a": None}, {"a": ["offer"]}),
    *({"a": {"offer": 7}}, {"a": {"offer": {}}}, {"a": {"offer": [TOLD]}}),
]


def changed(**members: object) -> dict[str, Any]:
    return {"a": {"offer": TOLD | members}}


@pytest.mark.parametrize(
    ("told", "offers"),
    [
        ({"a": {"item_indices": [0], "metadata": {}, "offer": TOLD}}, {"a": OFFER}),
        ({"a": {"offer": None}}, {"a": None}),
        ({"other": {"offer": TOLD}}, {}),
        ({"a": {"peer_host": "10.0.0.7", "peer_port": 5601}}, {}),
        *((told, {}) for told in NONE),
        (changed(item="another"), {}),
        (changed(producer=""), {}),
        (changed(leg="x" * 257), {}),
        *((changed(**{name: "\ud800"}), {}) for name in ("producer", "leg")),  # which no message could hold
        (changed(embedding={"shape": [16, -1], "dtype": "F32"}), {}),
        (changed(embedding={"shape": [16], "dtype": "F32"}), {}),
        (changed(embedding={"shape": [16, 1 << 60], "dtype": "F32"}), {}),
        (changed(embedding={"shape": [16, 1 << 99], "dtype": "F32"}), {}),
        (changed(embedding={"shape": [16, 128], "dtype": "I64"}), {}),
    ],
)
def test_offers_are_read_from_a_requests_body(told: object, offers: dict[str, Offer | None]) -> None:
    request = SimpleNamespace(ec_transfer_params=told, mm_features=[SimpleNamespace(identifier="a")])
    assert read_offers(request) == offers


@pytest.mark.parametrize(
    ("extra", "consumer"),
    [
        ({"ec_transfer_params": {"consumer": "PD1"}}, "PD1"),
        (None, ""),
        ({}, ""),
        ({"ec_transfer_params": None}, ""),
        ({"ec_transfer_params": "PD1"}, ""),
        ({"ec_transfer_params": {"consumer": 7}}, ""),
        ({"ec_transfer_params": {"consumer": "x" * 257}}, ""),
        ({"ec_transfer_params": {"consumer": "\ud800"}}, ""),
    ],
)
def test_whom_an_encoders_request_names(extra: object, consumer: str) -> None:
    assert consumer_of(SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))) == consumer
    assert consumer_of(SimpleNamespace(sampling_params=None)) == ""


@pytest.mark.parametrize(
    ("vision", "width"),
    [(None, 128), (SimpleNamespace(), 128), (SimpleNamespace(deepstack_visual_indexes=[5, 11, 17]), 512)],
)
def test_an_embedding_is_as_wide_as_the_model_and_its_levels(vision: object, width: int) -> None:
    model = SimpleNamespace(hf_config=SimpleNamespace(vision_config=vision), get_inputs_embeds_size=lambda: 128)
    assert model_width(model) == width


@pytest.mark.parametrize(
    ("name", "ranks", "found"), [("E1", 1, "E1"), ("", 1, "engine"), ("E1", 2, "E1-dp1"), ("", 2, "engine-dp1")]
)
def test_each_engine_has_a_name_of_its_own(name: str, ranks: int, found: str) -> None:
    config = SimpleNamespace(
        ec_transfer_config=SimpleNamespace(engine_id="engine"),
        parallel_config=SimpleNamespace(data_parallel_size=ranks, data_parallel_rank=1),
    )
    assert engine_name(config, ECSettings(redis_url="redis://x", name=name)) == found
