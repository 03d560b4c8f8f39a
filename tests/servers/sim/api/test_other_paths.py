"""The paths that few clients know: batches of conversations, counts of tokens, Cohere's embeddings, the load."""

from __future__ import annotations

from typing import Any

import pytest

HI = [{"role": "user", "content": "hi there"}]
BYE = [{"role": "user", "content": "and good bye"}]


async def test_a_batch_has_a_choice_for_each_conversation(lab: Any) -> None:
    r = await lab.start()
    batch = (await lab.post(r, "/v1/chat/completions/batch", {"messages": [HI, BYE], "max_tokens": 9})).json
    alone = [(await lab.chat(r, messages, max_tokens=9)) for messages in (HI, BYE)]
    assert [choice["index"] for choice in batch["choices"]] == [0, 1]
    assert [choice["message"]["content"] for choice in batch["choices"]] == [one.text for one in alone]
    assert batch["usage"]["prompt_tokens"] == sum(one.json["usage"]["prompt_tokens"] for one in alone)


@pytest.mark.parametrize(
    "body", [{"messages": HI}, {"messages": []}, {"messages": [HI], "stream": True}, {"messages": [HI], "n": 2}]
)
async def test_what_a_batch_cannot_be_is_refused(lab: Any, body: Any) -> None:
    assert (await lab.post(await lab.start(), "/v1/chat/completions/batch", body)).status == 400


async def test_a_count_of_tokens_is_the_prompts(lab: Any) -> None:
    r = await lab.start()
    body = {"messages": HI, "system": "Be kind."}
    counted = (await lab.post(r, "/v1/messages/count_tokens", body)).json
    answered = (await lab.post(r, "/v1/messages", {**body, "max_tokens": 3})).json
    assert counted == {"input_tokens": answered["usage"]["input_tokens"]}
    refused = await lab.post(r, "/v1/messages/count_tokens", {**body, "model": "nope"})
    assert (refused.status, refused.json["type"]) == (404, "error")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tokens_of_a_message_are_those_read_from_the_cache_and_the_others(lab: Any, stream: bool) -> None:
    r = await lab.start()
    body = {"messages": HI, "system": "Be kind.", "max_tokens": 3, "stream": stream}
    counted = (await lab.post(r, "/v1/messages/count_tokens", body)).json["input_tokens"]
    cached = []
    for _ in range(2):
        answer = await lab.post(r, "/v1/messages", body)
        usage = (answer.chunks[-2] if stream else answer.json)["usage"]
        cached.append(usage["cache_read_input_tokens"])
        assert usage["input_tokens"] + cached[-1] == counted
    assert cached == [0, counted // 16 * 16]


async def test_coheres_embeddings_are_those_of_openais_form(lab: Any) -> None:
    r = await lab.start()
    theirs = (await lab.post(r, "/v2/embed", {"texts": ["some text"], "embedding_types": ["float"]})).json
    ours = (await lab.post(r, "/v1/embeddings", {"input": "some text"})).json
    assert theirs["embeddings"]["float"] == [one["embedding"] for one in ours["data"]]
    assert (await lab.post(r, "/v2/embed", {})).status == 400


async def test_an_idle_engine_has_no_load(lab: Any) -> None:
    assert (await lab.fetch(await lab.start(), "/load")).json == {"server_load": 0}


async def test_an_alias_is_the_model_itself(lab: Any) -> None:
    r = await lab.start(model="base", aliases=("other",), loras=("tuned",))
    cards = (await lab.fetch(r, "/v1/models")).json["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("base", "base", None),
        ("other", "base", None),
        ("tuned", "tuned", "base"),
    ]
    base, other = [(await lab.chat(r, HI, model=name)) for name in ("base", "other")]
    assert other.text == base.text
    assert other.cached_tokens > 0
