"""The published document against the app that it describes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from ppd.proxy import errors
from ppd.proxy.app.admin_routes import CHANGEABLE, DrainCall, WorkerCall
from ppd.proxy.app.client_routes import create_app
from ppd.proxy.app.openapi import STATUSES, document, render
from ppd.proxy.assembly import assemble
from ppd.proxy.config import ProxyConfig
from ppd.proxy.errors import PPDError
from ppd.proxy.routing.receipt_notes import decision_headers
from ppd.proxy.settings import Settings
from ppd.proxy.telemetry.receipts import CandidatesRecord, Receipt

METHODS = {"get", "post", "put", "patch", "delete"}
DOCUMENT = document()
SCHEMAS = DOCUMENT["components"]["schemas"]


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from ([value["$ref"]] if "$ref" in value else [])
        for member in value.values():
            yield from references(member)
    elif isinstance(value, list):
        for member in value:
            yield from references(member)


def test_the_document_has_the_routes_of_the_app_and_no_others() -> None:
    proxy = assemble(Settings(ProxyConfig()))
    rules = create_app(proxy).url_map.iter_rules()
    proxy.listener.close()
    routes = {
        (re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule), method.lower())
        for rule in rules
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    documented = {(path, method) for path, item in DOCUMENT["paths"].items() for method in METHODS & item.keys()}
    assert documented == routes


def test_it_is_plain_json() -> None:
    assert json.loads(render()) == json.loads(json.dumps(DOCUMENT))


def test_every_reference_leads_somewhere_and_every_component_is_used() -> None:
    found = set(references(DOCUMENT))
    named = {
        f"#/components/{kind}/{name}"
        for kind in ("schemas", "responses", "headers")
        for name in DOCUMENT["components"][kind]
    }
    assert found <= named
    assert {name for name in named - found if not name.startswith("#/components/responses/")} == set()


def test_operations_have_names_of_their_own() -> None:
    ids = [
        operation["operationId"]
        for item in DOCUMENT["paths"].values()
        for method, operation in item.items()
        if method in METHODS
    ]
    assert len(ids) == len(set(ids))


def test_every_status_of_the_proxys_own_errors_is_there() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PPDError)]
    assert {kind.status for kind in kinds} - {500} <= STATUSES.keys()
    for path in ("/v1/chat/completions", "/v1/messages"):
        answers = DOCUMENT["paths"][path]["post"]["responses"].keys()
        assert {str(status) for status in STATUSES if status != 405} <= answers


def test_a_refusal_says_when_to_come_again() -> None:
    for name, answer in DOCUMENT["components"]["responses"].items():
        assert ("Retry-After" in answer.get("headers", {})) == name.endswith(("429", "503")), name


def test_the_decisions_headers_are_those_of_the_router() -> None:
    receipt = Receipt(id="a", at="", endpoint="", model="", stream=False, session="", turn=1, kind="first")
    receipt.route, receipt.reason, receipt.decode, receipt.prefill = "SPLIT", "first_turn", "D1", "P1"
    answer = DOCUMENT["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]
    assert decision_headers(receipt).keys() <= answer["headers"].keys()


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ("WorkerCall", set(WorkerCall.__struct_fields__)),
        ("DrainCall", set(DrainCall.__struct_fields__)),
        ("WeightsCall", set(CHANGEABLE)),
        ("Weights", set(CHANGEABLE)),
    ],
)
def test_the_operators_bodies_are_those_that_are_read(schema: str, names: set[str]) -> None:
    assert SCHEMAS[schema]["properties"].keys() == names


def test_what_is_said_of_a_receipt_is_in_it() -> None:
    said = SCHEMAS["Receipt"]["properties"]
    assert said.keys() <= set(Receipt.__struct_fields__)
    assert said["candidates"]["anyOf"][0]["properties"].keys() == set(CandidatesRecord.__struct_fields__)
