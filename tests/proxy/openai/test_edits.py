from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.kv_events.block_tokens import packed
from ppd.proxy.openai.answer import AnswerObserver
from ppd.proxy.openai.edits import edited_body, finished_body, parted
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.openai.stream_relay import Edits, StreamRelay
from ppd.proxy.readback.lineage import digest_of

KV = {"remote_host": "10.0.0.5", "remote_block_ids": [[1]]}
USAGE = {"prompt_tokens": 30, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 30, "other": 1}}
COUNTED = {"prompt_tokens": 30, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 16, "other": 1}}
CHOICE = {"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}
INPUT_USAGE = {"input_tokens": 30, "input_tokens_details": {"cached_tokens": 30}, "output_tokens": 4}
INPUT_COUNTED = {"input_tokens": 30, "input_tokens_details": {"cached_tokens": 16}, "output_tokens": 4}
READ_USAGE = {"input_tokens": 0, "cache_read_input_tokens": 30, "output_tokens": 4}
READ_COUNTED = {"input_tokens": 14, "cache_read_input_tokens": 16, "output_tokens": 4}

NONE = Edits()
HIDE = Edits(hide_usage=True)
COUNT = Edits(cached_tokens=16)


def relayed(endpoint: Endpoint, edits: Edits, event: bytes) -> bytes:
    return StreamRelay(endpoint, edits, AnswerObserver(endpoint)).feed(event)


def as_event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


@pytest.mark.parametrize(
    ("endpoint", "edits", "given", "expected"),
    [
        (Endpoint.CHAT, NONE, {"choices": [CHOICE], "kv_transfer_params": KV}, {"choices": [CHOICE]}),
        (Endpoint.COMPLETIONS, NONE, {"choices": [], "ec_transfer_params": KV}, {"choices": []}),
        (Endpoint.CHAT, NONE, {"choices": [{**CHOICE, "disaggregated_params": KV}]}, {"choices": [CHOICE]}),
        (Endpoint.CHAT, HIDE, {"choices": [CHOICE], "usage": USAGE}, {"choices": [CHOICE]}),
        (Endpoint.CHAT, COUNT, {"choices": [], "usage": USAGE}, {"choices": [], "usage": COUNTED}),
        (Endpoint.COMPLETIONS, COUNT, {"choices": [CHOICE], "usage": USAGE}, {"choices": [CHOICE], "usage": COUNTED}),
        (
            Endpoint.RESPONSES,
            COUNT,
            {"type": "response.completed", "response": {"usage": INPUT_USAGE, "kv_transfer_params": KV}},
            {"type": "response.completed", "response": {"usage": INPUT_COUNTED}},
        ),
        (
            Endpoint.MESSAGES,
            COUNT,
            {"type": "message_delta", "usage": READ_USAGE, "kv_transfer_params": KV},
            {"type": "message_delta", "usage": READ_COUNTED},
        ),
        (
            Endpoint.MESSAGES,
            COUNT,
            {"type": "message_start", "message": {"usage": READ_USAGE, "kv_transfer_params": KV}},
            {"type": "message_start", "message": {"usage": READ_COUNTED}},
        ),
    ],
)
def test_events_are_edited(endpoint: Endpoint, edits: Edits, given: Any, expected: Any) -> None:
    assert relayed(endpoint, edits, as_event(given)) == as_event(expected)


def test_a_usage_chunk_that_the_client_did_not_ask_for_is_dropped() -> None:
    assert relayed(Endpoint.CHAT, HIDE, as_event({"choices": [], "usage": USAGE})) == b""


def test_other_lines_of_an_edited_event_stay() -> None:
    event = b'event: response.completed\r\ndata: {"response": {"kv_transfer_params": {"a": 1}, "id" : "r"}}\r\n\r\n'
    expected = b'event: response.completed\r\ndata: {"response":{"id":"r"}}\r\n\r\n'
    assert relayed(Endpoint.RESPONSES, NONE, event) == expected


UNTOUCHED = [
    (Endpoint.CHAT, NONE, b'{"choices": [ ], "usage": {"prompt_tokens": 1.0}}'),
    (Endpoint.CHAT, NONE, b'{"kv_transfer_params": null, "x": 1}'),
    (Endpoint.CHAT, HIDE, b'{"choices": [{"delta": {"content": "the \\"usage\\" of it"}}]}'),
    (Endpoint.CHAT, HIDE, b'{"choices": [{"delta": {"content": "usage"}}], "usage": null}'),
    (Endpoint.CHAT, HIDE, b'{"choices": [{"delta": {"content": "\\"kv_transfer_params\\": {}"}}]}'),
    (Endpoint.CHAT, COUNT, b'{"usage": {"prompt_tokens": 3, "prompt_tokens_details": null}}'),
    (Endpoint.CHAT, COUNT, b'{"usage": {"prompt_tokens_details": {"cached_tokens": null}}}'),
    (Endpoint.MESSAGES, COUNT, b'{"usage": {"input_tokens": 3, "cache_read_input_tokens": null}}'),
    (Endpoint.MESSAGES, HIDE, b'{"type": "message_delta", "delta": {}}'),
    (Endpoint.RESPONSES, COUNT, b'{"type": "x", "response": "cached_tokens"}'),
    (Endpoint.CHAT, HIDE, b'{"usage": '),
    (Endpoint.CHAT, HIDE, b"[DONE]"),
]


@pytest.mark.parametrize(("endpoint", "edits", "data"), UNTOUCHED)
def test_what_needs_no_edit_stays_verbatim(endpoint: Endpoint, edits: Edits, data: bytes) -> None:
    event = b"data: " + data + b"\n\n"
    assert relayed(endpoint, edits, event) is event
    assert edited_body(data, edits) is data


@pytest.mark.parametrize(
    ("endpoint", "edits", "given", "expected"),
    [
        (Endpoint.CHAT, HIDE, {"usage": USAGE, "kv_transfer_params": KV}, {"usage": USAGE}),
        (Endpoint.CHAT, COUNT, {"usage": USAGE}, {"usage": COUNTED}),
        (Endpoint.RESPONSES, COUNT, {"usage": INPUT_USAGE, "ec_transfer_params": KV}, {"usage": INPUT_COUNTED}),
        (Endpoint.MESSAGES, COUNT, {"usage": READ_USAGE}, {"usage": READ_COUNTED}),
    ],
)
def test_bodies_are_edited(endpoint: Endpoint, edits: Edits, given: Any, expected: Any) -> None:
    assert edited_body(msgspec.json.encode(given), edits) == msgspec.json.encode(expected)


def test_the_rest_of_an_edited_body_stays_verbatim() -> None:
    body = b'{"choices":[ {"message" : {"content":"\\u00e9"}} ],"n":1.50,"kv_transfer_params":{"a":1}}'
    expected = b'{"choices":[ {"message" : {"content":"\\u00e9"}} ],"n":1.50}'
    assert edited_body(body, NONE) == expected


def test_a_body_shows_its_usage_asked_for_or_not() -> None:
    body = b'{"choices":[],"usage":{"prompt_tokens":1}}'
    assert edited_body(body, HIDE) is body


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FINISHED: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: {"message": {"role": "assistant", "content": "Hi", "tool_calls": [CALL]}, "logprobs": None},
    Endpoint.COMPLETIONS: {"text": "Hi", "logprobs": None},
}
KINDS = {Endpoint.CHAT: "chat.completion", Endpoint.COMPLETIONS: "text_completion"}


def finished(endpoint: Endpoint) -> dict[str, Any]:
    choice = {"index": 0, **FINISHED[endpoint], "finish_reason": "stop", "stop_reason": None}
    return {"id": "x", "object": KINDS[endpoint], "created": 1, "model": "m", "choices": [choice], "usage": USAGE}


@pytest.mark.parametrize("endpoint", FINISHED)
def test_an_answer_that_p_has_finished_is_whole_without_its_parameters(endpoint: Endpoint) -> None:
    answer = finished(endpoint)
    given = answer | {"choices": [answer["choices"][0] | {"disaggregated_params": KV}], "prompt_token_ids": [1]}
    body = finished_body(msgspec.json.encode(given), stream=False, usage=True)
    assert msgspec.json.decode(body) == answer


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("endpoint", FINISHED)
def test_and_a_stream_for_a_client_that_wants_one(endpoint: Endpoint, usage: bool) -> None:
    answer, whole, streamed = finished(endpoint), AnswerObserver(endpoint), AnswerObserver(endpoint)
    whole.observe_body(msgspec.json.encode(answer))
    body = finished_body(msgspec.json.encode(answer | {"prompt_token_ids": [1]}), stream=True, usage=usage)
    *events, done = [event.removeprefix(b"data: ") for event in body.split(b"\n\n")[:-1]]
    assert done == b"[DONE]"
    for event in (*events, done):
        streamed.observe(event)
    found, wanted = streamed.summary, whole.summary
    assert (found.finish_reason, found.ended, found.first_token_seen) == ("stop", True, True)
    assert found.completion_tokens == (wanted.completion_tokens if usage else None)
    first, last, *counted = map(msgspec.json.decode, events)
    assert {event["object"] for event in (first, last)} == {
        "chat.completion.chunk" if endpoint is Endpoint.CHAT else "text_completion"
    }
    assert (first["choices"][0]["finish_reason"], last["choices"][0]["finish_reason"]) == (None, "stop")
    assert counted == ([{**last, "choices": [], "usage": USAGE}] if usage else [])
    if endpoint is Endpoint.CHAT:
        delta = {"role": "assistant", "content": "Hi", "tool_calls": [{"index": 0, **CALL}]}
        assert (first["choices"][0]["delta"], last["choices"][0]["delta"]) == (delta, {})
    else:
        assert (first["choices"][0]["text"], last["choices"][0]["text"]) == ("Hi", "")


IDS = Edits(hide_token_ids=True)
SHOWN = {"index": 0, "delta": {"content": "x"}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"choices": [{**SHOWN, "token_ids": [1, 2]}]}, {"choices": [SHOWN]}),
        ({"choices": [SHOWN], "prompt_token_ids": [1, 2]}, {"choices": [SHOWN]}),
        ({"choices": [{**SHOWN, "prompt_token_ids": [1], "token_ids": []}]}, {"choices": [SHOWN]}),
        ({"choices": [{**SHOWN, "token_ids": None}]}, {"choices": [{**SHOWN, "token_ids": None}]}),
        ({"choices": [SHOWN], "kv_transfer_params": KV}, {"choices": [SHOWN]}),
    ],
)
def test_token_ids_that_only_the_proxy_asked_for_are_removed(given: Any, expected: Any) -> None:
    event = relayed(Endpoint.CHAT, IDS, as_event(given))
    assert msgspec.json.decode(event.removeprefix(b"data: ")) == expected
    assert msgspec.json.decode(edited_body(msgspec.json.encode(given), IDS)) == expected
    kept = {name: value for name, value in given.items() if name != "kv_transfer_params"}
    assert msgspec.json.decode(edited_body(msgspec.json.encode(given), NONE)) == kept, "a client may ask for them"


def test_a_text_that_names_them_stays() -> None:
    event = as_event({"choices": [{"index": 0, "delta": {"content": 'say "token_ids": [1]'}}]})
    assert relayed(Endpoint.CHAT, IDS, event) == event


def test_an_observer_that_is_asked_to_reads_the_handle_of_what_d_keeps() -> None:
    params = {"do_remote_decode": True, "remote_num_tokens": 3}
    body = {"choices": [{"index": 0, "token_ids": [3, 4]}], "prompt_token_ids": [1, 2], "kv_transfer_params": params}
    for reads in (True, False):
        observer = AnswerObserver(Endpoint.CHAT, reads_handle=reads)
        observer.observe_body(msgspec.json.encode(body))
        assert (observer.summary.handle is not None) is reads
    stream = AnswerObserver(Endpoint.CHAT, reads_handle=True)
    relay = StreamRelay(Endpoint.CHAT, IDS, stream)
    relay.feed(as_event({"choices": [], "prompt_token_ids": [1, 2]}))
    relay.feed(as_event({"choices": [{"token_ids": [3, 4]}]}))
    relay.feed(as_event({"choices": [], "kv_transfer_params": params}))
    assert stream.summary.handle is not None
    assert stream.summary.handle.tokens == 3


TRICKY = ("x", "", ",", 'say "hi"', ',"token_ids":[1]', "\\", "\n", "]}", "ü", "token_ids")


@given(st.lists(st.tuples(st.sampled_from(TRICKY), st.lists(st.integers(0, 10**10), max_size=3)), max_size=12))
def test_a_stream_with_ids_comes_out_as_one_without_and_tells_the_same_tokens(
    said: list[tuple[str, list[int]]],
) -> None:
    def stream(with_ids: bool) -> list[bytes]:
        return [
            as_event({"choices": [{"index": 0, "delta": {"content": text}} | ({"token_ids": ids} if with_ids else {})]})
            for text, ids in said
        ]

    seen = AnswerObserver(Endpoint.CHAT, reads_handle=True)
    relay = StreamRelay(Endpoint.CHAT, IDS, seen)
    relay.feed(as_event({"choices": [], "prompt_token_ids": [1, 2]}))
    assert b"".join(map(relay.feed, stream(True))) == b"".join(stream(False))
    assert seen.summary.events == len(said) + 1
    tokens = [1, 2, *(token for _, ids in said for token in ids)]
    relay.feed(as_event({"choices": [], "kv_transfer_params": {"remote_num_tokens": len(tokens)}}))
    if all(token < 2**32 for token in tokens):
        assert seen.summary.handle is not None
        assert seen.summary.handle.digest == digest_of(packed(tokens))
    else:
        assert seen.summary.handle is None


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (b'{"a":1,"token_ids":[1,22]}', (b'{"a":1}', [1, 22])),
        (b'{"a":1,"token_ids":[]}', (b'{"a":1}', [])),
        (b'{"a":1,"token_ids":null}', None),
        (b'{"a":1,"token_ids": [1]}', None),
        (b'{"a":1,"token_ids":[-1]}', None),
        (b'{"a":1,"token_ids":[1,]}', None),
        (b'{"a":1,"token_ids":[1234567890]}', None),
        (b'[{"a":1,"token_ids":[1]},{"a":1,"token_ids":[2]}]', None),
        (b'{"a":",\\"token_ids\\":[1]"}', None),
    ],
)
def test_ids_are_cut_out_where_they_are_in_one_place(event: bytes, expected: tuple[bytes, list[int]] | None) -> None:
    assert parted(event) == expected


LEG = "___prefill_addr_10.0.0.5:21001___decode_addr_10.0.0.9:22001_0a0b"
HIDDEN = Edits(hide_usage=True, hides=(LEG, "0a0b"))


def test_a_legs_id_with_addresses_is_shortened_in_whole_answers() -> None:
    body = msgspec.json.encode({"id": f"chatcmpl-{LEG}", "choices": []})
    assert msgspec.json.decode(edited_body(body, HIDDEN)) == {"id": "chatcmpl-0a0b", "choices": []}


@pytest.mark.parametrize("cut", [0, 40, 200])
def test_and_in_each_event_of_a_stream(cut: int) -> None:
    """Also in those that could pass unread, once their pattern is known."""
    event = as_event({"id": f"chatcmpl-{LEG}", "choices": [CHOICE | {"finish_reason": None}]})
    stream = event * 5 + as_event({"id": f"chatcmpl-{LEG}", "choices": [], "usage": USAGE})
    relay = StreamRelay(Endpoint.CHAT, HIDDEN, AnswerObserver(Endpoint.CHAT))
    pieces = [event, event, stream[:cut], stream[cut:], event[:-2]]
    assert not any(map(relay.passes, pieces[:2]))
    out = b"".join(relay.feed(piece) for piece in pieces)
    assert relay.plain is None
    assert (out + relay.finish()).startswith(event.replace(LEG.encode(), b"0a0b") * 8 + b'data: {"error"')
