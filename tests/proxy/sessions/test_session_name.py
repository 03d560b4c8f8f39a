"""Names that clients of Anthropic's Messages give their conversations; other endpoints' are in test_request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.requests import CHAT, MESSAGES, label, parse

UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"
CLAUDE_CODE = f"user_{'a1' * 32}_account_{UUID.replace('0', '1')}_session_{UUID}"


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ({"user_id": CLAUDE_CODE}, UUID),
        ({"user_id": f"user_{'a1' * 32}_account__session_{UUID}"}, UUID),
        ({"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": UUID})}, UUID),
        ({"user_id": "user_1"}, None),
        ({"user_id": "user_1_session_"}, None),
        ({"user_id": f"user_1_session_{'x' * 65}"}, None),
        ({"user_id": "{not JSON"}, None),
        ({"user_id": "{}"}, None),
        ({"user_id": '{"session_id": 7}'}, None),
        ({"user_id": '{"session_id": ""}'}, None),
        ({"user_id": "{" * 2000}, None),
        ({"user_id": '{"a":' * 20_000}, None),
        ({"user_id": 7}, None),
        ({"user_id": None}, None),
        ({}, None),
        (None, None),
        ([CLAUDE_CODE], None),
    ],
)
def test_claude_code_names_its_session_in_the_users_id(metadata: Any, name: str | None) -> None:
    assert parse(MESSAGES, metadata=metadata).prompt.label == label(name, MESSAGES)


def test_another_name_comes_before_it() -> None:
    request = parse(MESSAGES, metadata={"user_id": CLAUDE_CODE}, session_id="mine")
    assert request.prompt.label == label("mine", MESSAGES)


def test_other_endpoints_metadata_names_nothing() -> None:
    assert parse(CHAT, metadata={"user_id": CLAUDE_CODE}).prompt.label is None


def test_a_session_is_one_whatever_the_account() -> None:
    labels = {
        parse(MESSAGES, metadata={"user_id": user_id}).prompt.label
        for user_id in (CLAUDE_CODE, json.dumps({"session_id": UUID}))
    }
    assert len(labels) == 1
