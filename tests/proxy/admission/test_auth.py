"""Keys: whose request it is, and what of its headers a worker sees."""

from __future__ import annotations

import pytest

from ppd.proxy.admission.auth import (
    authenticate,
    check_admin,
    check_operator_path,
    check_use,
    forced_route,
    leg_headers,
    tenant_of,
)
from ppd.proxy.admission.keys import Client, Keys, decode, encode, hash_of
from ppd.proxy.admission.tenant_scope import TenantScope
from ppd.proxy.errors import Forbidden, LoopDetected, NotFound, PPDError, RequestError, Unauthorized
from ppd.proxy.policy import Route

ACME = Client(name="acme-1", tenant="acme", priority=2, models=("llama",))
RING: Keys = decode(encode(ACME, hash_of("Key-1")).encode(), "keys.toml")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer Key-1"},
        {"authorization": "bearer  Key-1 "},
        {"x-api-key": "Key-1"},
        {"authorization": "Basic Zm9v", "x-api-key": "Key-1"},
        {"authorization": "Bearer Key-1", "x-admin-key": "wrong"},
    ],
)
def test_a_key_stands_for_its_client(headers: dict[str, str]) -> None:
    assert authenticate(headers, RING) == ACME


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({}, "is needed"),
        ({"authorization": ""}, "is needed"),
        ({"authorization": "Bearer"}, "is needed"),
        ({"authorization": "Bearer "}, "is needed"),
        ({"authorization": "Basic Key-1"}, "is needed"),
        ({"authorization": "Key-1"}, "is needed"),
        ({"x-admin-key": "Key-1"}, "is needed"),
        ({"x-api-key": ""}, "is needed"),
        ({"authorization": "Bearer key-1"}, "is unknown or was revoked"),
        ({"authorization": "Bearer wrong", "x-api-key": "Key-1"}, "is unknown or was revoked"),
        ({"x-api-key": "\u00e9"}, "is unknown or was revoked"),
        ({"x-api-key": hash_of("Key-1")}, "is unknown or was revoked"),
    ],
)
def test_anybody_else_is_refused_and_the_key_not_repeated(headers: dict[str, str], said: str) -> None:
    with pytest.raises(Unauthorized, match=said) as caught:
        authenticate(headers, RING)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert not any(value in caught.value.message for value in ("Key-1", "key-1", "\u00e9"))


def test_an_absent_key_is_nobodys_even_where_the_file_has_the_hash_of_nothing() -> None:
    nothing = decode(encode(ACME, hash_of("")).encode(), "keys.toml")
    with pytest.raises(Unauthorized):
        authenticate({}, nothing)


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer anything"}, {"x-api-key": "a"}])
def test_without_a_key_file_nobody_is_asked_and_tenants_go_by_what_they_send(headers: dict[str, str]) -> None:
    assert authenticate(headers, None) == Client(name="", tenant=tenant_of(headers))


@pytest.mark.parametrize(
    ("client", "model", "error"),
    [
        (ACME, "llama", None),
        (ACME, "qwen", NotFound),
        (ACME, "Llama", NotFound),
        (ACME, "", RequestError),
        (Client(name="", tenant=""), "qwen", None),
        (Client(name="", tenant=""), "", None),
    ],
)
def test_a_key_for_some_models_opens_no_other(client: Client, model: str, error: type[RequestError] | None) -> None:
    if error is None:
        check_use(client, model)
        return
    with pytest.raises(error) as caught:
        check_use(client, model)
    assert type(caught.value) is error
    assert caught.value.param == "model"
    assert caught.value.code == ("model_not_found" if model else None)


PATHS = ("/health", "/v1/models")


@pytest.mark.parametrize(
    ("path", "headers", "admin_key", "error"),
    [
        ("/health", {}, "", None),
        ("/health", {"x-admin-key": "wrong"}, "k", None),
        ("/metrics", {"x-admin-key": "k"}, "k", None),
        ("/metrics", {"authorization": "Bearer k"}, "k", None),
        ("/metrics", {}, "k", Unauthorized),
        ("/metrics", {"authorization": "Bearer Key-1"}, "k", Unauthorized),  # a client's
        ("/metrics", {}, "", NotFound),
        ("/metrics", {"x-admin-key": ""}, "", NotFound),
    ],
)
def test_the_admin_key_alone_opens_the_others(
    path: str, headers: dict[str, str], admin_key: str, error: type[RequestError] | None
) -> None:
    if error is None:
        check_operator_path(headers, path, PATHS, admin_key)
        return
    with pytest.raises(error):
        check_operator_path(headers, path, PATHS, admin_key)


@pytest.mark.parametrize(
    "headers", [{"authorization": "Bearer admin"}, {"x-api-key": "admin"}, {"x-admin-key": "admin"}]
)
def test_the_admin_key_is_no_clients_key(headers: dict[str, str]) -> None:
    check_admin({"x-admin-key": "admin"}, "admin")
    with pytest.raises(Unauthorized):
        authenticate(headers, RING)
    with pytest.raises(Unauthorized):
        check_admin({"authorization": "Bearer Key-1", "x-api-key": "Key-1"}, "admin")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"authorization": "Bearer c"}, {}),
        ({"x-api-key": "c"}, {}),
        ({"authorization": "Basic c", "x-api-key": "c", "x-admin-key": "k", "accept": "*/*"}, {"accept": "*/*"}),
    ],
)
def test_a_key_of_the_proxys_own_ends_at_the_proxy(headers: dict[str, str], expected: dict[str, str]) -> None:
    assert leg_headers(headers, forwards_key=False) == {"x-ppd-hops": "1", **expected}


def test_workers_get_a_sessions_id_as_its_tenants_own() -> None:
    one, two = (TenantScope(b"cache" * 4, ids * 4) for ids in (b"one..", b"two.."))
    sent = [leg_headers({"x-session-id": "7"}, scope=scope).get("x-session-id") for scope in (None, one, one, two)]
    assert sent == ["7", one.id("7"), one.id("7"), two.id("7")]
    assert len(set(sent)) == 3
    assert leg_headers({}, scope=one) == leg_headers({})


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "traceparent", "x-session-id"])
@pytest.mark.parametrize("end", ["\r", "\n", "\0"])
def test_a_header_that_would_break_a_legs_head_is_the_clients_mistake(name: str, end: str) -> None:
    with pytest.raises(RequestError, match="line end"):
        leg_headers({name: f"a{end}X-Evil: 1"})


def test_tenants_are_told_apart_by_key_and_the_key_is_not_in_the_name() -> None:
    one, two = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
    assert tenant_of(one) != tenant_of(two)
    assert tenant_of(one) == tenant_of(dict(one))
    assert tenant_of({"x-api-key": "one"}) != tenant_of({"x-api-key": "two"})
    assert tenant_of({"authorization": "Basic a"}) != tenant_of({"authorization": "Basic b"})
    assert tenant_of({}) == ""
    assert "one" not in tenant_of(one)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"authorization": "Bearer c"}, {"authorization": "Bearer c"}),
        ({"x-api-key": "c"}, {"authorization": "Bearer c"}),
        ({}, {}),
        ({"x-data-parallel-rank": "1", "x-vllm-priority": "0", "cookie": "a", "x-request-id": "r"}, {}),
        ({"x-ppd-force-route": "LOCAL", "x-admin-key": "k"}, {}),
        ({"traceparent": "00-1", "content-type": "a/b"}, {"traceparent": "00-1", "content-type": "a/b"}),
    ],
)
def test_a_leg_carries_what_a_worker_may_see(headers: dict[str, str], expected: dict[str, str]) -> None:
    assert leg_headers(headers) == {"x-ppd-hops": "1", **expected}


@pytest.mark.parametrize(
    ("hops", "sent", "error"),
    [
        ("0", "1", None),
        ("1", "2", None),
        ("2", "3", None),
        ("3", "", LoopDetected),
        ("99", "", LoopDetected),
        ("-1", "", RequestError),
        ("", "", RequestError),
        ("1.0", "", RequestError),
        ("\u0663", "", RequestError),
        ("1" * 400, "", RequestError),
    ],
)
def test_each_proxy_on_the_way_counts_itself(hops: str, sent: str, error: type[PPDError] | None) -> None:
    if error is None:
        assert leg_headers({"x-ppd-hops": hops})["x-ppd-hops"] == sent
        return
    with pytest.raises(error, match=r"proxies|X-PPD-Hops"):
        leg_headers({"x-ppd-hops": hops})


@pytest.mark.parametrize(
    "headers", [{"x-admin-key": "k"}, {"authorization": "Bearer k"}, {"authorization": "bearer k"}]
)
def test_the_admin_key_opens_the_admin_api(headers: dict[str, str]) -> None:
    check_admin(headers, "k")


@pytest.mark.parametrize(
    "headers", [{}, {"x-admin-key": ""}, {"x-admin-key": "K"}, {"authorization": "k"}, {"x-admin-key": "\u00e9"}]
)
def test_anything_else_does_not(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized):
        check_admin(headers, "k")
    with pytest.raises(NotFound):
        check_admin(headers, "")


@pytest.mark.parametrize("route", list(Route))
def test_the_admin_key_allows_a_route_to_be_forced(route: Route) -> None:
    assert forced_route({"x-ppd-force-route": str(route), "x-admin-key": "k"}, "k") is route


def test_a_request_that_forces_nothing_needs_no_key() -> None:
    assert forced_route({}, "k") is None
    assert forced_route({"x-admin-key": "wrong"}, "k") is None


@pytest.mark.parametrize(
    ("headers", "admin_key"),
    [
        ({}, "k"),
        ({"x-admin-key": "K"}, "k"),
        ({"x-admin-key": "\u00e9"}, "k"),
        ({"authorization": "Bearer k"}, "k"),  # the tenant's, whatever it says
        ({"x-api-key": "k"}, "k"),
        ({"x-admin-key": ""}, ""),
        ({}, ""),
    ],
)
def test_anybody_else_who_forces_a_route_is_refused(headers: dict[str, str], admin_key: str) -> None:
    for wanted in ("LOCAL", "elsewhere"):
        with pytest.raises(Forbidden):
            forced_route({"x-ppd-force-route": wanted, **headers}, admin_key)


@pytest.mark.parametrize("wanted", ["", "local", "MOVE", "LOCAL,SPLIT"])
def test_a_route_that_there_is_not_is_the_askers_mistake(wanted: str) -> None:
    with pytest.raises(RequestError, match="must be LOCAL, SPLIT, REPLICA, READBACK") as caught:
        forced_route({"x-ppd-force-route": wanted, "x-admin-key": "k"}, "k")
    assert caught.value.status == 400
