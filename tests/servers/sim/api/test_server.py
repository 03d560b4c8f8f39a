"""The HTTP surface: shapes of answers, streams and errors."""

from __future__ import annotations

import hashlib
from typing import Any

import aiohttp
import pytest

HI = [{"role": "user", "content": "hi there"}]


async def test_a_stream_and_a_whole_answer_say_the_same(lab: Any) -> None:
    r = await lab.start()
    whole, stream = await lab.chat(r, HI), await lab.chat(r, HI, stream=True)
    assert stream.text == whole.text
    assert stream.headers["Content-Type"].startswith("text/event-stream")
    assert stream.chunks[-1]["choices"][0]["finish_reason"] == whole.json["choices"][0]["finish_reason"] == "stop"


async def test_a_chat_stream_has_vllms_order(lab: Any) -> None:
    r = await lab.start()
    answer = await lab.chat(r, HI, stream=True, max_tokens=3, stream_options={"include_usage": True})
    first, *middle, last, usage = answer.chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in [*middle, last]] == [None, None, "length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert answer.body.endswith(b"\n\ndata: [DONE]\n\n")


async def test_usage_is_streamed_only_when_asked_for(lab: Any) -> None:
    r = await lab.start()
    assert b"usage" not in (await lab.chat(r, HI, stream=True)).body
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = (await lab.chat(r, HI, stream=True, max_tokens=2, stream_options=options)).chunks
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 2]


async def test_a_second_request_reports_its_cache_hit(lab: Any) -> None:
    r = await lab.start()
    assert [(await lab.chat(r, HI)).cached_tokens for _ in range(2)] == [0, 16]


async def test_a_stop_string_ends_both_forms_alike(lab: Any) -> None:
    r = await lab.start()
    text = (await lab.chat(r, HI)).text
    stop = text[5:8]
    whole, stream = await lab.chat(r, HI, stop=stop), await lab.chat(r, HI, stop=[stop], stream=True)
    assert whole.text == stream.text == text[: text.index(stop)]
    assert whole.json["choices"][0]["stop_reason"] == stop


async def test_token_ids_are_returned_on_request(lab: Any) -> None:
    r = await lab.start()
    answer = (await lab.chat(r, HI, return_token_ids=True, max_tokens=4)).json
    text = answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["token_ids"] == [ord(letter) for letter in text]
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    chunks = (await lab.chat(r, HI, return_token_ids=True, max_tokens=4, stream=True)).chunks
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks[1:]] == [[ord(letter)] for letter in text]


async def test_a_list_of_prompts_has_a_choice_each(lab: Any) -> None:
    r = await lab.start()
    answer = (await lab.post(r, "/v1/completions", {"prompt": ["one", "two"], "n": 2, "max_tokens": 5})).json
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 20,
        "total_tokens": 26,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_completions_stream(lab: Any) -> None:
    r = await lab.start()
    body = {"prompt": "one", "max_tokens": 5}
    whole = (await lab.post(r, "/v1/completions", body)).json["choices"][0]["text"]
    chunks = (await lab.post(r, "/v1/completions", body | {"stream": True})).chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


async def test_text_and_its_token_ids_are_one_prompt(lab: Any) -> None:
    r = await lab.start()
    texts = [
        (await lab.post(r, "/v1/completions", {"prompt": prompt})).json["choices"][0]["text"]
        for prompt in ("héllo", [ord(letter) for letter in "héllo"])
    ]
    assert texts[0] == texts[1]


def events(body: bytes) -> list[str]:
    return [line[7:] for line in body.decode().splitlines() if line.startswith("event: ")]


async def test_responses_stream_named_events(lab: Any) -> None:
    r = await lab.start()
    body = {"input": "hi there", "max_output_tokens": 3}
    whole = (await lab.post(r, "/v1/responses", body)).json
    stream = await lab.post(r, "/v1/responses", body | {"stream": True})
    assert events(stream.body) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event["type"] for event in stream.chunks] == events(stream.body)
    assert [event["sequence_number"] for event in stream.chunks] == list(range(11))
    assert b"[DONE]" not in stream.body
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(event["delta"] for event in stream.chunks[4:7]) == text
    assert stream.chunks[-1]["response"]["output"][0]["content"][0]["text"] == text
    assert whole["usage"]["output_tokens"] == 3


async def test_messages_stream_named_events(lab: Any) -> None:
    r = await lab.start()
    body = {"messages": HI, "max_tokens": 3, "system": "be brief"}
    whole = (await lab.post(r, "/v1/messages", body)).json
    stream = await lab.post(r, "/v1/messages", body | {"stream": True})
    assert events(stream.body) == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event["delta"]["text"] for event in stream.chunks[2:5]) == whole["content"][0]["text"]
    assert whole["stop_reason"] == "max_tokens"
    assert whole["usage"]["output_tokens"] == 3


async def test_the_apis_give_the_same_answer_to_the_same_conversation(lab: Any) -> None:
    r = await lab.start()
    chat = (await lab.chat(r, HI, max_tokens=9)).text
    responses = (await lab.post(r, "/v1/responses", {"input": "hi there", "max_output_tokens": 9})).json
    messages = (await lab.post(r, "/v1/messages", {"messages": HI, "max_tokens": 9})).json
    assert responses["output"][0]["content"][0]["text"] == messages["content"][0]["text"] == chat


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/v1/chat/completions", {"messages": HI, "model": "nope"}, 404, "NotFoundError"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 40_000}]}, 400, "BadRequestError"),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 3, "min_tokens": 4}, 400, "BadRequestError"),
        ("/v1/completions", {"max_tokens": 3}, 400, "BadRequestError"),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_x"}, 404, "NotFoundError"),
        ("/v1/embeddings", {"input": "a", "model": "nope"}, 404, "NotFoundError"),
        ("/tokenize", {}, 400, "BadRequestError"),
    ],
)
async def test_errors_have_openais_shape(lab: Any, path: str, body: Any, status: int, kind: str) -> None:
    answer = await lab.post(await lab.start(), path, body)
    assert answer.status == status
    error = answer.json["error"]
    assert (error["type"], error["code"]) == (kind, status)
    assert set(error) == {"message", "type", "param", "code"}


async def test_messages_errors_have_anthropics_shape(lab: Any) -> None:
    answer = await lab.post(await lab.start(), "/v1/messages", {"messages": HI})
    assert answer.status == 400
    assert answer.json["type"] == "error"
    assert answer.json["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("data", "content_type"), [(b"{", "application/json"), (b"{}", "text/plain"), (b"[1]", "application/json")]
)
async def test_what_is_not_a_json_object_is_refused(lab: Any, data: bytes, content_type: str) -> None:
    r = await lab.start()
    url = f"http://{r.address}/v1/chat/completions"
    async with lab.session.post(url, data=data, headers={"Content-Type": content_type}) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["code"] == 400


async def test_unknown_paths_and_methods(lab: Any) -> None:
    r = await lab.start(allow_faults=False)
    assert (await lab.fetch(r, "/nowhere")).status == 404
    assert (await lab.fetch(r, "/v1/chat/completions")).status == 405
    assert (await lab.post(r, "/faults", {})).status == 404


async def test_models_and_their_adapters(lab: Any) -> None:
    r = await lab.start(model="base", loras=("tuned",), max_model_len=512)
    cards = (await lab.fetch(r, "/v1/models")).json["data"]
    assert [(card["id"], card["parent"], card["max_model_len"]) for card in cards] == [
        ("base", None, 512),
        ("tuned", "base", None),
    ]
    base, tuned = [(await lab.chat(r, HI, model=name)) for name in ("base", "tuned")]
    assert base.text != tuned.text
    assert tuned.cached_tokens == 0


async def test_tokens_there_and_back(lab: Any) -> None:
    r = await lab.start(max_model_len=128)
    answer = (await lab.post(r, "/tokenize", {"prompt": "añ😀", "return_token_strs": True})).json
    assert answer == {"count": 3, "max_model_len": 128, "tokens": [97, 241, 128512], "token_strs": ["a", "ñ", "😀"]}
    assert (await lab.post(r, "/detokenize", {"tokens": answer["tokens"]})).json == {"prompt": "añ😀"}
    chat = (await lab.post(r, "/tokenize", {"messages": HI})).json
    assert chat["count"] == (await lab.chat(r, HI)).json["usage"]["prompt_tokens"]


async def test_health_version_ping(lab: Any) -> None:
    r = await lab.start()
    assert [(await lab.fetch(r, path)).status for path in ("/health", "/ping", "/version")] == [200] * 3
    assert (await lab.fetch(r, "/version")).json == {"version": "0.33.0"}


async def test_the_key_guards_v1_only(lab: Any) -> None:
    r = await lab.start(api_key="secret")
    refused = await lab.chat(r, HI)
    assert (refused.status, refused.json) == (401, {"error": "Unauthorized"})
    assert (await lab.fetch(r, "/metrics")).status == 200
    bearer = {"Authorization": "Bearer secret"}
    assert (await lab.post(r, "/v1/chat/completions", {"messages": HI}, headers=bearer)).status == 200


async def test_request_ids_come_from_the_header_then_the_body(lab: Any) -> None:
    r = await lab.start()
    body = {"messages": HI, "max_tokens": 1, "request_id": "two"}
    header = await lab.post(r, "/v1/chat/completions", body, headers={"X-Request-Id": "one"})
    assert header.json["id"] == "chatcmpl-one"
    assert (await lab.post(r, "/v1/chat/completions", body)).json["id"] == "chatcmpl-two"
    assert (await lab.post(r, "/v1/completions", {"prompt": "a"})).json["id"].startswith("cmpl-")


async def test_what_arrived_can_be_looked_at(lab: Any) -> None:
    r = await lab.start(keep_requests=2)
    for text in ("one", "two", "three"):
        await lab.post(r, "/v1/completions", {"prompt": text}, headers={"X-Request-Id": text})
    assert [request.headers["X-Request-Id"] for request in r.received] == ["two", "three"]
    assert r.received[-1].body == b'{"prompt": "three"}'
    assert r.received[-1].path == "/v1/completions"


async def test_embeddings_scores_and_ranks_are_functions_of_their_texts(lab: Any) -> None:
    r = await lab.start()
    data = (await lab.post(r, "/v1/embeddings", {"input": ["red fox", "red fox", "blue"]})).json["data"]
    assert data[0]["embedding"] == data[1]["embedding"] != data[2]["embedding"]
    scores = (await lab.post(r, "/v1/score", {"text_1": "red fox", "text_2": ["red fox", "blue"]})).json["data"]
    assert scores[0]["score"] > scores[1]["score"]
    ranked = (await lab.post(r, "/v1/rerank", {"query": "red fox", "documents": ["blue", "red fox"], "top_n": 1})).json[
        "results"
    ]
    assert [result["index"] for result in ranked] == [1]
    classes = (await lab.post(r, "/classify", {"input": "red fox"})).json["data"]
    assert sum(classes[0]["probs"]) == pytest.approx(1)
    assert len((await lab.post(r, "/pooling", {"input": "red fox"})).json["data"][0]["data"]) == 16


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}),
        ("/v1/score", {"text_1": "a"}),
        ("/v1/rerank", {"query": "a"}),
        ("/v1/embeddings", {}),
        ("/v1/embeddings", {"input": "x" * 40_000}),
    ],
)
async def test_pooling_refuses_what_it_cannot_do(lab: Any, path: str, body: Any) -> None:
    assert (await lab.post(await lab.start(), path, body)).status == 400


async def test_an_upload_arrives_whole(lab: Any) -> None:
    r = await lab.start()
    sound = bytes(range(256)) * 40
    form = aiohttp.FormData({"model": "sim"})
    form.add_field("file", sound, filename="a.wav", content_type="audio/wav")
    async with lab.session.post(f"http://{r.address}/v1/audio/transcriptions", data=form) as answer:
        assert answer.status == 200
        text = (await answer.json())["text"]
    assert text == f"a.wav {len(sound)} bytes sha256 {hashlib.sha256(sound).hexdigest()}"
    assert (await lab.post(r, "/v1/audio/transcriptions", {})).status == 400
