"""What web pages may send and read, as values."""

from __future__ import annotations

import pytest

from ppd.proxy.admission.web_pages import Origins, check_is_json
from ppd.proxy.errors import Forbidden, RequestError, UnsupportedMediaType

PAGE = "https://chat.example"
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("content_type", "is_taken"),
    [
        ("application/json", True),
        ("Application/JSON ; charset=utf-8", True),
        ("application/vnd.api+json", True),
        ("application/ld+json;profile=x", True),
        # What a browser sends for any page without asking first.
        ("text/plain", False),
        ("text/plain; application/json", False),
        ("text/plain;charset=application/json", False),
        ("application/x-www-form-urlencoded", False),
        ("multipart/form-data; boundary=x", False),
        ("", False),
        ("text/plain,application/json", False),
        ("text/plain;+json", False),
        ("text/+json/+json", False),
        ("json", False),
        ("+json", False),
        ("application/jsonp", False),
        ("application/octet-stream", False),
    ],
)
def test_a_body_must_be_said_to_be_json(content_type: str, is_taken: bool) -> None:
    headers = {"content-type": content_type} if content_type else {}
    if is_taken:
        check_is_json(headers)
        return
    with pytest.raises(UnsupportedMediaType, match="must be application/json") as refused:
        check_is_json(headers)
    assert refused.value.status == 415


@pytest.mark.parametrize(
    ("allowed", "origin", "path", "seen_by"),
    [
        ((), PAGE, CHAT, None),
        ((PAGE,), PAGE, CHAT, PAGE),
        ((PAGE,), PAGE, "/v1/nothing", PAGE),
        ((PAGE,), "https://chat.example.evil", CHAT, None),
        ((PAGE,), "http://chat.example", CHAT, None),
        ((PAGE,), "null", CHAT, None),
        ((PAGE,), None, CHAT, None),
        (("*",), PAGE, CHAT, "*"),
        (("*",), "null", CHAT, "*"),
        (("*",), None, CHAT, "*"),
        # What is the operator's is for no page.
        (("*",), PAGE, "/admin", None),
        (("*",), PAGE, "/admin/workers", None),
        (("*",), PAGE, "/metrics", None),
        *((("*",), PAGE, path, None) for path in ("//metrics", "///ready", "//admin", "//admin/workers")),
        (("*",), PAGE, "//v1/models", "*"),
        ((PAGE,), PAGE, "/admin/workers", None),
    ],
)
def test_pages_of_allowed_origins_read_answers(
    allowed: tuple[str, ...], origin: str | None, path: str, seen_by: str | None
) -> None:
    headers = dict(Origins(allowed).headers(origin, path))
    assert headers.get("Access-Control-Allow-Origin") == seen_by
    assert headers.get("Access-Control-Expose-Headers") == ("*" if seen_by else None)
    assert "Access-Control-Allow-Credentials" not in headers
    is_shared = path == CHAT and allowed == (PAGE,)
    assert not is_shared or headers["Vary"] == "Origin"  # no cache may give one page's answer to another


ASKED = {"origin": PAGE, "access-control-request-method": "POST"}


@pytest.mark.parametrize(
    ("allowed", "headers", "path", "names"),
    [
        ((), ASKED, CHAT, None),
        ((PAGE,), ASKED, CHAT, ""),
        (("*",), ASKED, CHAT, ""),
        (("https://other.example",), ASKED, CHAT, None),
        ((PAGE,), {"origin": PAGE}, CHAT, None),
        (("*",), {"access-control-request-method": "POST"}, CHAT, None),
        (("*",), ASKED, "/admin/workers", None),
        (
            (PAGE,),
            {**ASKED, "access-control-request-headers": "authorization,Content-Type, x-stainless-os"},
            CHAT,
            "authorization, content-type, x-stainless-os",
        ),
        ((PAGE,), {**ASKED, "access-control-request-headers": "x-admin-key,x-api-key"}, CHAT, "x-api-key"),
        ((PAGE,), {**ASKED, "access-control-request-headers": "a b,\xff"}, CHAT, ""),
    ],
)
def test_a_preflight_is_answered_with_what_the_page_asked_for(
    allowed: tuple[str, ...], headers: dict[str, str], path: str, names: str | None
) -> None:
    answer = Origins(allowed).preflight(headers, path)
    assert (None if answer is None else dict(answer)["Access-Control-Allow-Headers"]) == names


FORM = {"content-type": "multipart/form-data; boundary=x", "host": "proxy:10001"}


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        (FORM, None),  # no browser: each says where a form comes from
        ({**FORM, "origin": PAGE}, None),
        ({**FORM, "origin": "http://proxy:10001"}, None),  # a page of the same host
        ({**FORM, "origin": "https://evil.example"}, Forbidden),
        ({**FORM, "origin": "null"}, Forbidden),
        ({**FORM, "origin": "https://proxy:10001.evil.example"}, Forbidden),
        ({"content-type": "application/json", "origin": "https://evil.example"}, None),  # it took a preflight
        ({"content-type": "text/plain"}, UnsupportedMediaType),
        ({}, UnsupportedMediaType),
    ],
)
def test_a_form_comes_from_no_page_of_another_host(headers: dict[str, str], error: type[RequestError] | None) -> None:
    origins = Origins((PAGE,))
    if error is None:
        origins.check_form(headers)
        return
    with pytest.raises(error):
        origins.check_form(headers)
