from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ppd.proxy.connectors import missing_coordinates, usual_connector, usual_engine
from ppd.proxy.connectors.leg import Finished, Handoff, NoHandoff, Pair, counts_of
from ppd.proxy.connectors.trtllm import TrtLlm, TrtLlmGenerationFirst, endpoint_told, info_url
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.openai.request import Endpoint, Fields

FieldsOf = Callable[[dict[str, Any]], Fields]
MakePair = Callable[..., Pair]

KEY = str(2**62 + 7)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stop": ["x"], "logprobs": True}
STREAM = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
PARAMS = {
    "request_type": "context_only",
    "first_gen_tokens": [576],
    "ctx_request_id": 2**62 + 9,
    "disagg_request_id": int(KEY),
    "ctx_dp_rank": 0,
    "encoded_opaque_state": "AAECAw==",
    "draft_tokens": None,
    "new_in_2030": {"x": 1},
}
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
CHOICE = {"index": 0, "finish_reason": "length", "disaggregated_params": PARAMS}
ANSWER = {
    "choices": [CHOICE],
    "usage": USAGE,
    "prompt_token_ids": [1, 2, 3],
}


def body_of(leg: Any) -> dict[str, Any]:
    return dict(msgspec.json.decode(leg.body))


def handoff(pair: Pair, answer: Any) -> Handoff | Finished | NoHandoff:
    return TrtLlm().handoff(msgspec.json.encode(answer), pair)


def test_p_is_asked_for_the_context_with_all_that_its_first_token_depends_on(
    fields_of: FieldsOf, make_pair: MakePair
) -> None:
    leg = TrtLlm().prefill_leg(Endpoint.CHAT, fields_of(STREAM), make_pair(key=KEY), "leg-p")
    asked = {"request_type": "context_only", "disagg_request_id": int(KEY)}
    assert body_of(leg) == {**CHAT, "stream": False, "disaggregated_params": asked}


@pytest.mark.parametrize(("endpoint", "name"), [(Endpoint.CHAT, "prompt_token_ids"), (Endpoint.COMPLETIONS, "prompt")])
def test_d_gets_what_p_answered_and_the_prompts_token_ids(
    fields_of: FieldsOf, make_pair: MakePair, endpoint: Endpoint, name: str
) -> None:
    pair = make_pair(key=KEY)
    found = handoff(pair, ANSWER)
    assert isinstance(found, Handoff)
    assert (found.tokens, found.cached_tokens) == (3, 2)
    body = body_of(TrtLlm().decode_leg(endpoint, fields_of({**STREAM, "prompt": "hi"}), pair, "leg-d", found))
    assert body.pop("disaggregated_params") == {**PARAMS, "request_type": "generation_only", "ctx_usage": USAGE}
    assert body.pop(name) == [1, 2, 3]
    body.pop("prompt", None)
    assert body == STREAM


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"choices": []}, "choices_not_one"),
        ({"choices": ANSWER["choices"] * 2}, "choices_not_one"),  # type: ignore[operator]
        ({"choices": "x"}, "answer_undecodable"),
        ({"choices": [{"finish_reason": "length"}]}, "params_missing"),
        ({"choices": [{"finish_reason": "timeout", "disaggregated_params": PARAMS}]}, "finish_reason_unknown"),
        ({"choices": [{"disaggregated_params": PARAMS}]}, "finish_reason_unknown"),
        ({"prompt_token_ids": None}, "prompt_token_ids_missing"),
        ({"prompt_token_ids": []}, "prompt_token_ids_missing"),
        ({"prompt_token_ids": [1, "2"]}, "prompt_token_ids_missing"),
        ({"prompt_token_ids": "x"}, "prompt_token_ids_missing"),
    ],
)
def test_an_answer_that_d_could_not_use_is_refused_by_name(
    make_pair: MakePair, change: dict[str, Any], reason: str
) -> None:
    assert handoff(make_pair(key=KEY), ANSWER | change) == NoHandoff(reason)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("request_type", "generation_only", "not_a_context"),
        ("ctx_request_id", None, "ctx_request_id_missing"),
        ("disagg_request_id", "7", "disagg_request_id_missing"),
        ("disagg_request_id", True, "disagg_request_id_missing"),
        ("disagg_request_id", 2**62 + 8, "another_request"),
        ("first_gen_tokens", [], "first_gen_tokens_missing"),
        ("first_gen_tokens", [-1], "first_gen_tokens_missing"),
        ("encoded_opaque_state", "", "opaque_state_missing"),
        ("encoded_opaque_state", 7, "opaque_state_missing"),
    ],
)
def test_wrong_parameters_are_refused_by_name(make_pair: MakePair, name: str, value: Any, reason: str) -> None:
    choice = {"finish_reason": "length", "disaggregated_params": PARAMS | {name: value}}
    assert handoff(make_pair(key=KEY), ANSWER | {"choices": [choice]}) == NoHandoff(reason)


def test_a_first_token_that_ends_the_answer_leaves_nothing_to_hand_over(make_pair: MakePair) -> None:
    answer = ANSWER | {"choices": [{"finish_reason": "stop", "message": {"content": ""}}]}
    assert handoff(make_pair(key=KEY), answer) == Finished(msgspec.json.encode(answer), 2)


@pytest.mark.parametrize("reason", ["stop", "tool_calls", "length", "not_finished", None])
def test_generation_first_such_an_answer_is_all_of_it_too(make_pair: MakePair, reason: str | None) -> None:
    answer = msgspec.json.encode({"choices": [{"finish_reason": reason}], "usage": ANSWER["usage"]})
    found = TrtLlmGenerationFirst().handoff(answer, make_pair(key=KEY))
    assert found == (Finished(answer, 2) if reason in ("stop", "tool_calls") else counts_of(answer))


@pytest.mark.parametrize(
    "answer", [b"junk", b"{}", b'{"choices": [{"finish_reason": "stop"}, {"finish_reason": "stop"}]}']
)
def test_generation_first_an_answer_that_tells_nothing_leaves_it_to_d(make_pair: MakePair, answer: bytes) -> None:
    assert TrtLlmGenerationFirst().handoff(answer, make_pair(key=KEY)) == counts_of(answer)


@pytest.mark.parametrize("content", ["", None, "\ufffd", "\u00e9"])
def test_what_the_first_token_shows_bears_on_nothing(make_pair: MakePair, content: str | None) -> None:
    """Its text is that of half a character, where the character takes several tokens: D has the token itself."""
    pair = make_pair(key=KEY)
    choice = {**CHOICE, "message": {"role": "assistant", "content": content}}
    assert handoff(pair, {**ANSWER, "choices": [choice]}) == handoff(pair, ANSWER)


def test_ids_are_not_an_engines_own_and_another_one_each_time() -> None:
    for connector in (TrtLlm(), TrtLlmGenerationFirst()):
        keys = {int(connector.new_key()) for _ in range(100)}
        assert len(keys) == 100
        assert all(2**42 <= key < 2**63 for key in keys)


@pytest.mark.parametrize(
    ("told", "rank"), [({}, None), ({"ctx_dp_rank": "3"}, 3)], ids=["any rank", "the rank that was told"]
)
def test_generation_first_both_know_the_id_beforehand(
    fields_of: FieldsOf, make_pair: MakePair, told: dict[str, str], rank: int | None
) -> None:
    connector = TrtLlmGenerationFirst()
    pair = make_pair(key=KEY, of_prefill={"ctx_info_endpoint": "tcp://10.0.0.5:9000", **told})
    p = body_of(connector.prefill_leg(Endpoint.CHAT, fields_of(STREAM), pair, "p"))
    d = body_of(connector.decode_leg(Endpoint.CHAT, fields_of(STREAM), pair, "d", None))
    assert p.pop("disaggregated_params") == {
        "request_type": "context_only",
        "disagg_request_id": int(KEY),
        "schedule_style": 1,
    }
    assert d.pop("disaggregated_params") == {
        "request_type": "generation_only",
        "schedule_style": 1,
        "disagg_request_id": int(KEY),
        "ctx_request_id": int(KEY),
        "ctx_info_endpoint": "tcp://10.0.0.5:9000",
        "ctx_dp_rank": rank,
    }
    assert (p, d) == ({**CHAT, "stream": False}, STREAM)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (
            b'{"disaggregated_params": {"ctx_info_endpoint": ["tcp://h:1", "tcp://h:2"], "ctx_dp_rank": 2}}',
            {"ctx_info_endpoint": "tcp://h:1", "ctx_dp_rank": "2"},
        ),
        (
            b'{"disaggregated_params": {"ctx_info_endpoint": "tcp://h:1", "ctx_dp_rank": null}}',
            {"ctx_info_endpoint": "tcp://h:1"},
        ),
        (b'{"disaggregated_params": {"ctx_info_endpoint": [], "ctx_dp_rank": 0}}', {}),
        (b'{"disaggregated_params": {"ctx_info_endpoint": null}}', {}),
        (b'{"disaggregated_params": {"ctx_info_endpoint": ["tcp://h:1\\r\\nx"]}}', {}),
        (b'{"disaggregated_params": {"ctx_info_endpoint": ["tcp://h:1"], "ctx_dp_rank": -1}}', {}),
        (b"{}", {}),
        (b"junk", {}),
    ],
)
def test_what_a_context_server_says_of_itself(answer: bytes, found: dict[str, str]) -> None:
    assert endpoint_told(answer) == found


def test_only_a_p_of_generation_first_is_asked_and_serves_no_split_until_it_has_told() -> None:
    p = Worker(role=Role.PREFILL, address="10.0.0.5:8100", connector="trtllm_gen_first", engine="trtllm")
    assert (info_url(p), missing_coordinates(p)) == ("http://10.0.0.5:8100/server_info", ("ctx_info_endpoint",))
    assert info_url(replace(p, coordinates={"ctx_info_endpoint": "tcp://h:1"})) == ""
    assert info_url(Worker(role=Role.DECODE, address="a:1", connector="trtllm_gen_first")) == ""
    assert info_url(Worker(role=Role.PREFILL, address="a:1", connector="trtllm")) == ""


def test_engine_and_connector_name_each_other() -> None:
    assert [usual_connector("P", "trtllm"), usual_connector("R", "trtllm")] == ["trtllm", "none"]
    assert {usual_engine(name) for name in ("trtllm", "trtllm_gen_first")} == {"trtllm"}
