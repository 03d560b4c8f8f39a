"""A P that begins anew under the engine's id that D knows: which pairs get no turn, and when they do again."""

from __future__ import annotations

import pytest

from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import Load, Role, Worker, WorkerId
from ppd.proxy.health import strangers
from ppd.proxy.health.strangers import Strangers

P, D = WorkerId("p:1"), WorkerId("d:1")
PAIR = {(P, D)}


class Fleet:
    """One P, one D and a replica, as probes find them."""

    def __init__(self, connector: str = "nixl_push") -> None:
        self.registry = Registry()
        self.strangers = Strangers(self.registry)
        self.registry.on_came = self.strangers.came
        self.connector = connector
        self.add("p:1", Role.PREFILL, "one")
        self.add("d:1", Role.DECODE)
        self.add("r:1", Role.REPLICA)

    def add(self, address: str, role: Role, engine: str = "") -> None:
        coordinates = {"engine_id": engine} if engine else {}
        worker = Worker(role=role, address=address, connector=self.connector, coordinates=coordinates)
        self.registry.add_static(worker, 0.0)

    def worker(self, worker_id: WorkerId) -> Worker:
        view = self.registry.view(worker_id)
        assert view is not None
        return view.worker

    def play(self, script: str) -> Fleet:
        """`p1`: P is found up, as its first process; `p-`: it is down; `p/two`: its config gives it another id."""
        for step in script.split():
            name, what = step[0], step[1:]
            worker = WorkerId(f"{name}:1")
            if what == "-":
                self.registry.probe_failed(worker, refused=True)
            elif what == "gone":
                self.registry.remove(worker)
            elif what.startswith("/"):
                self.add(worker, Role.PREFILL, what[1:])
            else:
                view = self.registry.view(worker)
                if view is None:
                    self.add(worker, Role.PREFILL if name == "p" else Role.DECODE, "one" if name == "p" else "")
                view = self.registry.view(worker)
                assert view is not None
                self.registry.probed(worker, replace_incarnation(view.worker, what), Load(), 1.0)
        return self


def replace_incarnation(worker: Worker, incarnation: str) -> Worker:
    return Worker(
        role=worker.role,
        address=worker.address,
        connector=worker.connector,
        coordinates=worker.coordinates,
        incarnation=incarnation,
    )


@pytest.mark.parametrize(
    ("script", "strange"),
    [
        ("p1 d1", False),
        ("d1 p1", False),
        ("p1 d1 p1", False),
        ("p1 d1 p- p1", False),  # it was away
        ("p1 d1 p2", True),
        ("pl d1 p1", False),  # an agent's first word, before its engine has told when it began
        ("pl d1 pm", False),  # an engine that does not tell, and another agent beside it
        ("p1 d1 pl p1", False),
        ("p1 d1 pl p2", True),
        ("p1 d1 p2 pl", True),
        ("d1 p1 p2", True),
        ("p1 d1 p- p2", True),
        ("p1 d1 pgone p2", True),
        ("p1 d1 p2 p3", True),
        ("p1 d1 p2 d2", False),
        ("p1 d1 p2 d2 p3", True),  # the second D knows the second P
        ("p1 d1 p- d2 p2", False),  # both began anew, D while P was down
        ("p1 d1 d2 p2", True),  # D while the first P was up
        ("p1 d1 p/two p2", False),
        ("p1 d1 p2 p/two p3", False),
        ("p1 d1 dgone p2 d1", True),  # it was only silent
        ("p1 d1 p- d- d1 p2", True),
        ("p1 d1 p2 dgone d2", False),
        ("p1 d1 p- d2 p1 p2", True),  # the second D has met the first P since it is up again
        ("p1 d1 d- p2 d1", True),
        ("p1 d1 d- p2 d2", False),
        ("p1 d1 d- d2 p2 p3", True),
        ("p1 d1 p2 p/two", False),  # it was given the other id before its config
        ("p1 d1 p2 p/two p/one", True),
    ],
)
def test_which_pairs_get_no_turn(script: str, strange: bool) -> None:
    assert Fleet().play(script).strangers.pairs == (PAIR if strange else set())


@pytest.mark.parametrize(
    ("script", "unproven"),
    [
        ("d1 p99", True),  # which D knows, or one that was there before this proxy began
        ("p99 d1", True),
        ("p1 d99", False),  # D had met no other
        ("p5 d1", False),  # as when a fleet starts
        ("d1 pl", False),  # one that does not tell when it began
        ("dl p99", False),
        ("d1 p99 p- p99", True),
        ("d1 p99 d100", False),
        ("d1 p99 d100 p200", False),  # that one is known to be strange
        ("d1 p/two p99", True),
    ],
)
def test_a_d_that_began_long_before_p_may_know_another(script: str, unproven: bool) -> None:
    fleet = Fleet().play(script)
    assert fleet.strangers.unproven == (PAIR if unproven else set())
    fleet.strangers.proven((P, D))
    assert fleet.play("p- d- p99").strangers.unproven == set()


@pytest.mark.parametrize("connector", ["nixl", "mooncake", "sglang"])
def test_where_p_is_told_each_time_nothing_is_to_be_proven(connector: str) -> None:
    assert Fleet(connector).play("d1 p99").strangers.unproven == set()


@pytest.mark.parametrize("connector", ["nixl", "mooncake", "sglang"])
def test_those_who_are_told_of_p_each_time_know_it(connector: str) -> None:
    assert Fleet(connector).play("p1 d1 p2").strangers.pairs == set()


def test_another_process_of_the_proxy_finds_the_same() -> None:
    leader, other = Fleet(), Fleet()
    for script in ("p1 d1", "p2"):
        leader.play(script)
        for view in leader.registry.views():
            other.registry.adopt(view)
    assert other.strangers.pairs == leader.strangers.pairs == PAIR


def test_a_process_that_has_just_started_finds_the_same() -> None:
    """It sees all workers join, and is told then what others have seen."""
    leader, newcomer = Fleet().play("p1 d1 p2"), Fleet()
    for view in leader.registry.views():
        newcomer.registry.adopt(view)
    newcomer.strangers.adopt(leader.strangers.met())
    assert newcomer.strangers.pairs == PAIR
    assert newcomer.play("d2").strangers.pairs == set()
    assert newcomer.play("p3").strangers.pairs == PAIR


def test_a_pair_that_hands_over_in_another_way_is_none_any_more() -> None:
    fleet = Fleet().play("p1 d1 p2")
    fleet.connector = "nixl"
    fleet.add("p:1", Role.PREFILL)
    fleet.add("d:1", Role.DECODE)
    assert fleet.strangers.pairs == set()


def test_pairs_of_those_who_have_left_are_forgotten() -> None:
    fleet = Fleet().play("p1 d1 p2 pgone")
    fleet.add("p:2", Role.PREFILL, "other")
    worker = WorkerId("p:2")
    fleet.registry.probed(worker, replace_incarnation(fleet.worker(worker), "1"), Load(), 1.0)
    assert fleet.strangers.pairs == set()


def test_of_many_meetings_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "KEPT", 0)
    assert Fleet().play("p1 d1 p2").strangers.pairs == set()


def test_operators_are_told_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    Fleet().play("p1 d1 p2 p2")
    [record] = caplog.records
    assert "P p:1" in record.message and "D d:1" in record.message
    assert "a new engine_id at each start, or restart D" in record.message
