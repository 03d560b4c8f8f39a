"""What a tenant's prompts, ids and stored responses become on the workers."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from ppd.proxy.admission.tenant_scope import TenantScope
from ppd.proxy.connectors.leg import answering_fields, leg, public_fields
from ppd.proxy.openai.body_members import SHORT_BYTES, Members, decoded
from ppd.proxy.openai.request import Endpoint

ONE = TenantScope(b"cache of one" * 2, b"ids of one" * 2)
TWO = TenantScope(b"cache of two" * 2, b"ids of two" * 2)
# vLLM 0.32: at most 128 characters, and none that cache backends could read as a path.
TAKEN_BY_VLLM = re.compile(r"[^@/\\\x00]{1,128}")


def members_of(**body: Any) -> Members:
    data = json.dumps(body).encode()
    return Members(msgspec.json.decode(data, type=dict[str, msgspec.Raw]), data)


def shown(scope: TenantScope, salt: str | None = None, **body: Any) -> Any:
    return {name: decoded(value) for name, value in scope.fields(members_of(**body), salt).items()}


@pytest.mark.parametrize("own", ["", "a", "a" * 5000, "\ud800", "@/\\\0"])
def test_a_salt_is_one_that_engines_take_whatever_the_clients_own(own: str) -> None:
    assert TAKEN_BY_VLLM.fullmatch(ONE.salt(own))


def test_a_salt_is_of_its_tenant_and_of_the_clients_own() -> None:
    salts = [scope.salt(own) for scope in (ONE, TWO) for own in ("", "a", "b")]
    assert len(set(salts)) == len(salts)
    assert ONE.salt("a") == TenantScope(ONE.cache, b"other ids").salt("a")


@pytest.mark.parametrize(
    ("sent", "left"),
    [
        ({"session_id": "s"}, {"session_id": ONE.id("s")}),
        ({"session_id": 7}, {"session_id": ONE.id("7")}),
        ({"prompt_cache_key": "s", "user": "u"}, {"prompt_cache_key": ONE.id("s"), "user": "u"}),
        ({"conversation": {"id": "c", "x": 1}}, {"conversation": {"id": ONE.id("c"), "x": 1}}),
        ({"vllm_xargs": {"session_id": "s", "n": 1}}, {"vllm_xargs": {"session_id": ONE.id("s"), "n": 1}}),
        ({"session_id": None, "vllm_xargs": {"n": 1}}, {"session_id": None, "vllm_xargs": {"n": 1}}),
        ({"session_id": ["s"], "conversation": True}, {"session_id": ["s"], "conversation": True}),
    ],
)
def test_ids_become_the_tenants_own(sent: dict[str, Any], left: dict[str, Any]) -> None:
    assert shown(ONE, **sent) == left
    assert ONE.id("s") != TWO.id("s")


def test_a_response_belongs_to_the_tenant_that_it_was_made_for() -> None:
    made = ONE.new_response_id()
    assert made != ONE.new_response_id()
    assert ONE.owns(made)
    assert not TWO.owns(made)
    for wrong in ("", "resp_", "resp_" + "0" * 32, made[:-1], made + "0", made.upper(), "resp_\u00e9" + made[6:]):
        assert not ONE.owns(wrong)


def test_a_leg_carries_the_proxys_own_request_id_and_never_the_clients() -> None:
    fields = ONE.fields(members_of(input="hi", request_id="mine"), ONE.salt(), is_response=True)
    sent = json.loads(leg(Endpoint.RESPONSES, answering_fields(Endpoint.RESPONSES, fields), "l", fields).body)
    assert ONE.owns(sent["request_id"])
    assert sent["cache_salt"] == ONE.salt()
    renamed = ONE.renamed(fields)
    again = json.loads(leg(Endpoint.RESPONSES, answering_fields(Endpoint.RESPONSES, renamed), "l", renamed).body)
    assert ONE.owns(again.pop("request_id"))
    assert again == {name: value for name, value in sent.items() if name != "request_id"}
    assert "request_id" not in public_fields(members_of(input="hi", request_id="mine"))


def test_a_long_body_is_not_copied_for_a_salt() -> None:
    body = members_of(messages=[{"role": "user", "content": "x" * SHORT_BYTES}], model="m", cache_salt="mine")
    fields = ONE.fields(body, ONE.salt("mine"))
    made = leg(Endpoint.CHAT, answering_fields(Endpoint.CHAT, fields), "l", fields)
    assert any(isinstance(part, memoryview) and len(part) > SHORT_BYTES for part in made.parts)
    sent = json.loads(made.body)
    assert sent == {**json.loads(bytes(body.body)), "cache_salt": ONE.salt("mine")}


def test_nothing_shows_the_secrets() -> None:
    assert repr(ONE) == "TenantScope()"
