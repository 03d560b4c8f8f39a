"""No way to write a part brings a client's own name of it to an engine, which would take it for any tenant's item."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from ppd.proxy.bodies.named_media import with_named_media
from ppd.proxy.errors import RequestError
from ppd.proxy.openai.request import Endpoint
from tests.support.requests import PROMPT_MEMBER, parse_bytes

SITE, STOLEN = "https://a.example/x.png", "another tenant's"
AN_IMAGE = {"image_url": SITE, "uuid": STOLEN}
PARTS: dict[str, dict[str, Any]] = {
    "an image": {"type": "image_url", "image_url": {"url": SITE}, "uuid": STOLEN},
    "as text": {"type": "text", "text": "a", **AN_IMAGE},
    "as text of Responses": {"type": "input_text", "text": "a", **AN_IMAGE},
    "as a refusal": {"type": "refusal", "refusal": "a", **AN_IMAGE},
    "as reasoning": {"type": "thinking", "thinking": "", **AN_IMAGE},
    "as a call": {"type": "tool_use", "id": "t", "name": "f", "input": {}, **AN_IMAGE},
    "as a result": {"type": "tool_result", "tool_use_id": "t", "content": [], **AN_IMAGE},
    "within a result": {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", **AN_IMAGE}]},
    "without a type": {"text": "a", **AN_IMAGE},
    "with null for a type": {"type": None, **AN_IMAGE},
    "with an empty type": {"type": "", **AN_IMAGE},
    "by its name alone": {"type": "image_pil", "image_pil": None, "uuid": STOLEN},
    "as text, by its name alone": {"type": "text", "text": "a", "image_pil": None, "uuid": STOLEN},
    "encoded, by its name alone": {"image_embeds": None, "uuid": STOLEN},
}
MESSAGES: dict[str, dict[str, Any]] = {
    "in a message": {},
    "in a message with a type": {"type": "message"},
    "in a message that is a part": {"type": "input_image", "image_url": SITE},
}


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES])
@pytest.mark.parametrize("case", PARTS)
def test_a_clients_name_reaches_no_engine(endpoint: Endpoint, case: str) -> None:
    for role, beside, is_escaped in product(("user", "system", "assistant", "tool"), MESSAGES.values(), (False, True)):
        said = {"role": role, "content": [PARTS[case]], **beside}
        prompt = [{"role": "user", "content": "hi"}, said, {"role": "user", "content": "go on"}]
        body = json.dumps({"model": "m", PROMPT_MEMBER[endpoint]: prompt, "max_tokens": 4})
        if is_escaped:
            body = body.replace('"uuid"', '"uu\\u0069d"').replace('"image_url"', '"im\\u0061ge_url"')
        try:
            request = parse_bytes(body.encode(), endpoint)
            if request.has_media:
                request = with_named_media(request, "t", 512)
        except RequestError:
            continue
        assert not any(STOLEN.encode() in bytes(value) for value in request.fields.values()), (role, beside)
