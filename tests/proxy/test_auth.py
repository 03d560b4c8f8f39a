"""Keys: whose request it is, and what of its headers a worker sees."""

from __future__ import annotations

import pytest

from ppd.proxy.auth import check_admin, forced_route, leg_headers, tenant_of
from ppd.proxy.errors import Forbidden, NotFound, RequestError, Unauthorized
from ppd.proxy.policy import Route


def test_tenants_are_told_apart_by_key_and_the_key_is_not_in_the_name() -> None:
    one, two = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
    assert tenant_of(one) != tenant_of(two)
    assert tenant_of(one) == tenant_of(dict(one))
    assert tenant_of({"x-api-key": "one"}) != tenant_of({"x-api-key": "two"})
    assert tenant_of({"authorization": "Basic a"}) != tenant_of({"authorization": "Basic b"})
    assert tenant_of({}) == ""
    assert "one" not in tenant_of(one)


@pytest.mark.parametrize(
    ("headers", "worker_key", "expected"),
    [
        ({"authorization": "Bearer c"}, "", {"authorization": "Bearer c"}),
        ({"authorization": "Bearer c"}, "w", {"authorization": "Bearer w"}),
        ({"x-api-key": "c"}, "", {"authorization": "Bearer c"}),
        ({}, "", {}),
        ({"x-data-parallel-rank": "1", "x-vllm-priority": "0", "cookie": "a", "x-request-id": "r"}, "", {}),
        ({"x-ppd-force-route": "LOCAL", "x-admin-key": "k"}, "", {}),
        ({"traceparent": "00-1", "content-type": "a/b"}, "", {"traceparent": "00-1", "content-type": "a/b"}),
    ],
)
def test_a_leg_carries_what_a_worker_may_see(
    headers: dict[str, str], worker_key: str, expected: dict[str, str]
) -> None:
    assert leg_headers(headers, worker_key) == expected


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


@pytest.mark.parametrize("wanted", ["", "local", "READBACK", "LOCAL,SPLIT"])
def test_a_route_that_there_is_not_is_the_askers_mistake(wanted: str) -> None:
    with pytest.raises(RequestError, match="must be LOCAL, SPLIT, REPLICA") as caught:
        forced_route({"x-ppd-force-route": wanted, "x-admin-key": "k"}, "k")
    assert caught.value.status == 400
