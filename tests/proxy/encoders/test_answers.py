"""Encoders' legs and answers: what they are sent, what is believed of what they say, and what other legs then carry."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from ppd.proxy.bodies.named_media import with_named_media
from ppd.proxy.connectors import plain_leg
from ppd.proxy.encoders.answers import EncodedItems, leg_body, read_answer
from ppd.proxy.openai.request import Request
from tests.support.requests import CHAT, image, parse, text, user

URLS = ("https://a/1.png", "https://a/2.png")


def request(**members: Any) -> Request:
    found = parse(CHAT, [user([text("secret"), *map(image, URLS)]), user("more")], **members)
    return with_named_media(found, "t", 9)


ASKED = request()
FIRST, SECOND = ASKED.media


def entry(*indices: int, **members: Any) -> dict[str, Any]:
    return {"item_indices": list(indices), "metadata": {"grid": [1]}, "peer_host": "10.0.0.8", **members}


def told(params: Any) -> EncodedItems:
    found = read_answer(json.dumps({"ec_transfer_params": params}).encode(), ASKED.media)
    assert found is not None
    return found


def sent(items: EncodedItems, asked: Request = ASKED, **how: bool) -> dict[str, Any]:
    fields = items.fields(asked, asked.fields, **{"computes": True, "strips": True, **how})
    body: dict[str, Any] = json.loads(plain_leg(CHAT, fields, "id").body)
    return body


def test_an_encoder_is_sent_media_alone() -> None:
    asked = request(tools=[], mm_processor_kwargs={"a": 1}, priority=3, session_id="s", stream=True, max_tokens=9)
    assert json.loads(b"".join(leg_body(asked, asked.media))) == {
        "model": "m",
        "stream": False,
        "max_tokens": 1,
        "mm_processor_kwargs": {"a": 1},
        "priority": 3,
        "session_id": "s",
        "messages": [user([image(url) | {"uuid": one.name} for url, one in zip(URLS, asked.media, strict=True)])],
    }


def test_what_encoders_tell_goes_to_the_leg_that_computes_the_prompt() -> None:
    params = {FIRST.name: entry(0), "an engine's own name": entry(1, metadata={})}
    body = sent(told(params))
    assert body["ec_transfer_params"] == params
    first, second = body["messages"][0]["content"][1:]
    assert first == {"type": "image_embeds", "image_embeds": {"grid": [1]}, "uuid": FIRST.name}
    assert second == image(URLS[1]) | {"uuid": SECOND.name}
    decode = sent(told(params), computes=False)
    assert "ec_transfer_params" not in decode and decode["messages"] == body["messages"]
    whole = sent(told(params), strips=False)
    assert [part["type"] for part in whole["messages"][0]["content"]] == ["text", "image_url", "image_url"]
    # Options change engines' names of items: metadata of another name would be found by none.
    options = request(media_io_kwargs={"video": {}})
    assert sent(told(params), options)["messages"] == json.loads(bytes(options.fields["messages"]))


def test_several_answers_become_one() -> None:
    joined = told({FIRST.name: entry(0)}).joined(told({SECOND.name: entry(1, peer_host="10.0.0.9")}))
    assert set(joined.params) == {FIRST.name, SECOND.name}
    assert [json.loads(bytes(host)) for host in joined.hosts] == ["10.0.0.8", "10.0.0.9"]


@pytest.mark.parametrize("answer", [b"{}", b'{"ec_transfer_params":null}', b'{"ec_transfer_params":{}}'])
def test_an_encoder_may_tell_nothing(answer: bytes) -> None:
    found = read_answer(answer, ASKED.media)
    assert found is not None and sent(found) == json.loads(plain_leg(CHAT, ASKED.fields, "id").body)


def test_places_that_are_none_are_those_of_no_item() -> None:
    assert told({"x": entry(7, -1)}).places == ()
    assert [place.item for place in told({SECOND.name: entry(7)}).places] == [SECOND]


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"[]", b"\xff", b'{"ec_transfer_params":[]}', b'{"ec_transfer_params":{"a":1}}'),
        msgspec.json.encode({"ec_transfer_params": {"a": {"item_indices": "0"}}}),
        msgspec.json.encode({"ec_transfer_params": {"a": {"metadata": 7}}}),
        b'{"ec_transfer_params":' + b'{"a":' * 5000,
    ],
)
def test_what_no_encoder_says_is_no_answer(answer: bytes) -> None:
    assert read_answer(answer, ASKED.media) is None
