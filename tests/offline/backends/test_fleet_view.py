from __future__ import annotations

import json

import msgspec
import pytest

from ppd.offline.backends.fleet_view import FleetView, ListedWorker, is_same
from ppd.proxy.errors import FormatError


def worker(name: str, **changes: object) -> ListedWorker:
    made = ListedWorker(
        name=name,
        role=name[0],
        state="up",
        models=("m",),
        engine="vllm",
        engine_version="0.32.0",
        connector="nixl" if name[0] != "R" else "none",
        incarnation="1",
        inflight=0,
    )
    return msgspec.structs.replace(made, **changes)


def fleet(names: str) -> FleetView:
    return FleetView(tuple(worker(name) for name in names.split()))


def changed(view: FleetView, name: str, **changes: object) -> FleetView:
    return FleetView(tuple(worker(w.name, **changes) if w.name == name else w for w in view.workers))


@pytest.mark.parametrize(
    ("names", "topology"),
    [("P1 D1 D2 D3", "1P_3D"), ("D1 P2 D2 P1", "2P_2D"), ("R1 R2 R3 R4", "4R"), ("D1 R1 P1 D2", "1R_1P_2D"), ("", "")],
)
def test_a_fleet_is_named_as_a_topology(names: str, topology: str) -> None:
    assert fleet(names).topology == topology


def test_a_d_that_keeps_its_later_turns_is_named_so() -> None:
    view = changed(changed(fleet("P1 D1 D2 D3"), "D2", x=1.0), "D1", x=0.0)
    assert changed(view, "D3", x=1.0).topology == "1P_1D_2pD"


def test_a_worker_that_takes_no_turns_does_not_count() -> None:
    view = changed(fleet("P1 D1 D2"), "D2", state="draining")
    assert (view.topology, view.is_ready) == ("1P_1D", False)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1P_3D", "1P_3D", True),
        ("2D_1R_1P", "1R_1P_2D", True),
        ("1P_3D", "3P_1D", False),
        ("4R", "", False),
        ("1P_2D_1pD", "1P_1pD_2D", True),
        ("1P_2D_1pD", "1P_1D_2pD", False),
        ("1P_3pD", "1P_3D", False),
    ],
)
def test_topologies_are_compared_by_their_counts(one: str, other: str, same: bool) -> None:
    assert is_same(one, other) is same


BEFORE = fleet("P1 D1 D2")


@pytest.mark.parametrize(
    ("now", "damage"),
    [
        (BEFORE, ""),
        (fleet("P1 D1"), "D2 is gone"),
        (fleet("P1 D1 D2 D3"), "D3 is new"),
        (changed(BEFORE, "D2", state="down"), "D2 is down"),
        (changed(BEFORE, "P1", incarnation="2"), "P1 was restarted"),
        (changed(BEFORE, "P1", incarnation=""), ""),
        (changed(BEFORE, "P1", inflight=7), ""),
    ],
)
def test_what_happened_to_a_fleet_is_told_by_worker(now: FleetView, damage: str) -> None:
    assert now.damage(BEFORE) == damage


def test_a_fleet_in_use_is_not_ready() -> None:
    assert BEFORE.is_ready
    assert not changed(BEFORE, "D1", inflight=1).is_ready
    assert not fleet("").is_ready


def test_a_model_counts_where_every_worker_serves_it() -> None:
    view = changed(BEFORE, "D1", models=("m", "lora"))
    assert view.models == ("m",)
    assert changed(BEFORE, "D1", models=("other",)).models == ()


def test_engines_and_connectors_are_named_once() -> None:
    assert (fleet("P1 D1 R1").engine, fleet("P1 D1 R1").connector) == ("vllm 0.32.0", "nixl")
    assert changed(BEFORE, "D1", engine_version="0.31.0").engine == "vllm 0.31.0, vllm 0.32.0"
    assert fleet("R1").connector == ""


def test_the_proxys_answer_is_read() -> None:
    entry = {**msgspec.to_builtins(worker("D1")), "silent_s": None, "kv_usage": 0.5}
    assert FleetView.decode(json.dumps({"workers": [entry]}).encode()) == fleet("D1")


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"workers": [{"name": "D1"}]}', b'{"deep":' + b"[" * 100_000])
def test_an_answer_that_is_none_is_one_line(body: bytes) -> None:
    with pytest.raises(FormatError, match="/admin/workers: "):
        FleetView.decode(body)
