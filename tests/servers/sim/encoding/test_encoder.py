"""What a simulated E takes and tells, and what the other engines take of that."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.core.embeddings import EmbeddingStore, MediaInput, placed
from ppd.servers.sim.core.errors import BadRequest
from ppd.servers.sim.encoding.encoder import Encoder
from ppd.servers.sim.encoding.media_parts import embeddings_given, media_inputs

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}, "uuid": "a"}
OTHER = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}, "uuid": "b"}
PEER = ("10.0.0.8", 5601)


def encoder(**changes: Any) -> Encoder:
    return Encoder(SimConfig(**changes), EmbeddingStore(9))


def leg(*parts: Any, **changes: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": list(parts)}], "stream": False, **changes}


async def told(one: Encoder, *parts: Any) -> dict[str, Any]:
    request, inputs = one.read(json.dumps(leg(*parts)).encode())
    await one.encode(inputs)
    params: dict[str, Any] = one.params(request, inputs, PEER)["ec_transfer_params"]
    return params


async def test_what_an_encoder_tells_stands_for_the_items() -> None:
    params = await told(encoder(), IMAGE, OTHER)
    assert {name: (one["item_indices"], one["peer_port"]) for name, one in params.items()} == {
        "a": ([0], 5601),
        "b": ([1], 5601),
    }
    (with_data,) = media_inputs({"messages": [{"content": [IMAGE]}]})
    part = {"type": "image_embeds", "image_embeds": params["a"]["metadata"], "uuid": "a"}
    (without,) = media_inputs({"messages": [{"content": [part]}]})
    assert (with_data.name, with_data.tokens, with_data.has_data) == (without.name, without.tokens, True)
    assert not without.has_data
    assert embeddings_given({"ec_transfer_params": params}, media_inputs({"messages": [{"content": [IMAGE, OTHER]}]}))


async def test_an_item_is_encoded_once() -> None:
    one = encoder()
    await told(one, IMAGE)
    await told(one, IMAGE, OTHER)
    assert (one.encoded, one.running) == (2, 0)


async def test_an_encoder_may_tell_no_metadata() -> None:
    assert (await told(encoder(encoder_metadata=False), IMAGE))["a"]["metadata"] == {}


@pytest.mark.parametrize(
    "body",
    [
        leg({"type": "text", "text": "hi"}),
        leg(IMAGE, {"type": "text", "text": "hi"}),
        leg({name: value for name, value in IMAGE.items() if name != "uuid"}),
        leg({**IMAGE, "uuid": 7}),
        leg(IMAGE, {**OTHER, "uuid": "a"}),
        leg(),
        leg(IMAGE, stream=True),
        leg(IMAGE, tools=[]),
        leg(IMAGE, ec_transfer_params={}),
        leg(IMAGE) | {"messages": [{"role": "user", "content": [IMAGE]}] * 2},
        leg(IMAGE) | {"messages": [{"role": "system", "content": [IMAGE]}]},
    ],
)
async def test_an_encoder_takes_nothing_but_its_legs(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        encoder().read(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("params", "more"),
    [
        ({"stranger": {}}, {}),
        ([], {}),
        ({"a": {"peer_host": "h"}}, {}),
        ({"a": {"unknown": 1}}, {}),
        (None, {"kv_transfer_params": {"do_remote_prefill": True}}),
    ],
)
async def test_other_engines_take_only_what_an_encoder_told_of_their_items(params: Any, more: dict[str, Any]) -> None:
    given = await told(encoder(), IMAGE) if params is None else params
    with pytest.raises(BadRequest):
        embeddings_given({"ec_transfer_params": given, **more}, media_inputs({"messages": [{"content": [IMAGE]}]}))


@pytest.mark.parametrize("part", [{"image_embeds": {"image_grid_thw": [1]}, "uuid": "a"}, {"image_embeds": {}}])
def test_metadata_that_no_encoder_tells_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        media_inputs({"messages": [{"content": [{"type": "image_embeds", **part}]}]})


def test_where_names_are_not_heard_an_item_is_known_by_its_content() -> None:
    """As in vLLM's Messages; so what an encoder has under the name is not found."""
    image, same, unlike = ({**IMAGE, "uuid": "a"}, {**IMAGE, "uuid": "b"}, OTHER)
    said = {"messages": [{"content": [image, same, unlike]}]}
    names = [one.name for one in media_inputs(said, is_named=False)]
    assert names[0] == names[1] != names[2] and "a" not in names
    assert [one.name for one in media_inputs(said)] == ["a", "b", "b"]


def test_items_lie_in_a_prompt_where_their_tokens_are() -> None:
    inputs = media_inputs({"messages": [{"content": [IMAGE, OTHER]}]})
    first, second = inputs
    prompt = [1, 2, *second.tokens, 3, *first.tokens, 4]
    assert [(one.at, one.media.name) for one in placed(prompt, inputs)] == [(2, "b"), (19, "a")]
    assert placed([1, 2], inputs) == () and placed(prompt, []) == ()


def test_a_store_knows_items_by_name_and_keeps_the_latest() -> None:
    store, (first, second) = EmbeddingStore(1), media_inputs({"messages": [{"content": [IMAGE, OTHER]}]})
    store.put(first.name, first.tokens)
    assert store.holds(first) and not store.mistaken(first)
    assert store.mistaken(MediaInput(first.name, second.tokens))
    store.put(second.name, second.tokens)
    assert not store.holds(first) and store.tokens("b") == second.tokens
