"""Who is next: classes, fair shares, arrival, and that nobody stands in the way of those that need something else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from ppd.proxy.admission.queue import (
    NEW_TENANTS,
    PRIORITY_LIMIT,
    Shares,
    Ticket,
    Waiter,
    WaitingLine,
    effective_priority,
)

TICKET = Ticket(tenant="a", arrived_s=0.0, fits=lambda: True)


def everyone(_: Ticket) -> bool:
    return True


def needing(*needs: str) -> Callable[[Ticket], bool]:
    return lambda ticket: ticket.needs in needs


def line_of(tickets: Iterable[Ticket]) -> WaitingLine:
    line = WaitingLine()
    for number, ticket in enumerate(tickets):
        line.add(Waiter(ticket, number))
    return line


def served(line: WaitingLine, count: int | None = None, has_room: Callable[[Ticket], bool] = everyone) -> list[Waiter]:
    """The next `count`, or all that have room."""
    out: list[Waiter] = []
    while count is None or len(out) < count:
        waiter = line.take(has_room)
        if waiter is None:
            break
        out.append(waiter)
    return out


def tenants(waiters: Iterable[Waiter]) -> str:
    return "".join(waiter.ticket.tenant for waiter in waiters)


@pytest.mark.parametrize(
    ("key", "asked", "effective"),
    [
        (0, None, 0),
        (5, None, 5),
        (0, 7, 7),  # less urgent than its key: as it likes
        (0, -7, 0),  # more urgent: its key's class
        (5, 0, 5),
        (0, 10**30, PRIORITY_LIMIT),
        (-1000, None, -PRIORITY_LIMIT),
        (-1000, -(10**30), -PRIORITY_LIMIT),
    ],
)
def test_a_request_may_lower_its_urgency(key: int, asked: int | None, effective: int) -> None:
    assert effective_priority(key, asked) == effective


def test_a_tenants_turns_are_served_as_they_came() -> None:
    tickets = [replace(TICKET, cost=cost, needs=needs) for cost, needs in [(900, "m"), (1, "n"), (50, "m"), (1, "n")]]
    assert [waiter.number for waiter in served(line_of(tickets))] == [0, 1, 2, 3]


def test_one_that_comes_into_a_flooded_queue_waits_for_one_service() -> None:
    line = line_of([replace(TICKET, cost=500)] * 1000)
    served(line, 300)
    line.add(Waiter(replace(TICKET, tenant="b", cost=500), 5000))
    assert "b" in tenants(served(line, 2))
    mixed = [*[replace(TICKET, cost=500)] * 3, *[replace(TICKET, tenant="b", cost=50)] * 20]
    assert tenants(served(line_of(mixed), 12)) == f"a{10 * 'b'}a"


def test_nobody_saves_up_credit_while_it_asks_for_nothing() -> None:
    line = line_of([replace(TICKET, cost=500)] * 400)
    served(line, 300)
    for number in range(100):
        line.add(Waiter(replace(TICKET, tenant="b", cost=500), 1000 + number))
    assert Counter(tenants(served(line, 40))) == {"a": 20, "b": 20}


def test_a_better_class_goes_first_whatever_its_cost_and_weight() -> None:
    urgent = replace(TICKET, tenant="u", priority=-1, cost=10_000, weight=0.01)
    assert tenants(served(line_of([*[TICKET] * 3, *[urgent] * 3]))) == "uuuaaa"


def test_those_that_need_a_busy_model_hold_up_nobody() -> None:
    busy = replace(TICKET, needs="busy", priority=-1)
    line = line_of([*[busy] * 5, replace(TICKET, needs="idle", tenant="b")])
    assert tenants(served(line, has_room=needing("idle"))) == "b"
    assert len(line) == 5


def test_a_tenants_own_busy_model_does_not_hold_up_its_idle_one() -> None:
    line = line_of([replace(TICKET, needs="busy"), replace(TICKET, needs="idle")])
    assert [waiter.number for waiter in served(line, has_room=needing("idle"))] == [1]


def test_room_is_asked_for_once_for_all_that_need_the_same() -> None:
    asked: list[object] = []

    def has_room(ticket: Ticket) -> bool:
        asked.append(ticket.needs)
        return False

    tickets = [
        replace(TICKET, tenant=name, needs=needs, priority=level)
        for name in "abc"
        for needs in "mn"
        for level in (0, 1)
    ]
    assert line_of(tickets).take(has_room) is None
    assert sorted(map(str, asked)) == ["m", "n"]


WEIGHTS = st.sampled_from([0.5, 1.0, 2.0, 3.0, 10.0])
COSTS = st.integers(1, 2000)


@given(
    flows=st.lists(st.tuples(WEIGHTS, st.lists(COSTS, min_size=30, max_size=30)), min_size=2, max_size=4),
    data=st.data(),
)
def test_tenants_that_wait_get_shares_by_weight(flows: list[tuple[float, list[int]]], data: st.DataObject) -> None:
    """The bound of start-time fair queueing (its theorem 1), over any time in which two tenants both wait."""
    tickets = [
        replace(TICKET, tenant=str(tenant), weight=weight, cost=cost)
        for tenant, (weight, costs) in enumerate(flows)
        for cost in costs
    ]
    line = line_of(data.draw(st.permutations(tickets)))
    order: list[Ticket] = []
    left = Counter(ticket.tenant for ticket in tickets)
    while all(left.values()):
        (waiter,) = served(line, 1)
        order.append(waiter.ticket)
        left[waiter.ticket.tenant] -= 1
    begin = data.draw(st.integers(0, len(order)))
    span = order[begin : data.draw(st.integers(begin, len(order)))]
    got = {
        str(tenant): sum(ticket.cost for ticket in span if ticket.tenant == str(tenant)) / weight
        for tenant, (weight, _) in enumerate(flows)
    }
    most = {str(tenant): max(costs) / weight for tenant, (weight, costs) in enumerate(flows)}
    for one, other in combinations(got, 2):
        assert abs(got[one] - got[other]) <= most[one] + most[other] + 1e-6


@pytest.mark.parametrize("busy_every", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_lane_with_little_room_is_shared_by_weight_while_others_move(busy_every: int, weight: float) -> None:
    """Its tenants must not be served by arrival because the class's virtual time has run away from them."""
    tickets = [replace(TICKET, tenant="a", weight=weight, needs="busy", cost=100)] * 50
    tickets += [replace(TICKET, tenant="b", needs="busy", cost=100)] * 50
    tickets += [replace(TICKET, tenant="c", needs="idle", cost=100)] * 1000
    line = line_of(tickets)
    shares: Counter[str] = Counter()
    while shares.total() < 40:
        assert served(line, busy_every, needing("idle"))
        shares.update(tenants(served(line, 1, needing("busy"))))
    assert shares["b"] == pytest.approx(40 / (weight + 1), abs=2)


def test_asking_for_many_models_brings_no_larger_share() -> None:
    tickets = [replace(TICKET, needs=needs, cost=100) for _ in range(50) for needs in "mnop"]
    tickets += [replace(TICKET, tenant="b", needs="m", cost=100)] * 100
    assert Counter(tenants(served(line_of(tickets), 80))) == {"a": 40, "b": 40}


def test_a_tenant_that_was_blocked_does_not_catch_up_at_others_cost() -> None:
    """While its model was busy it asked for nothing that could be had; then it floods another model."""
    line = line_of(
        [replace(TICKET, needs="busy", cost=100)] * 100 + [replace(TICKET, tenant="b", needs="idle", cost=100)] * 200
    )
    served(line, 100, needing("idle"))
    for number in range(100):
        line.add(Waiter(replace(TICKET, needs="idle", cost=100), 1000 + number))
    assert Counter(tenants(served(line, 40, needing("idle")))) == {"a": 20, "b": 20}


def test_one_that_comes_back_has_its_old_place_and_is_charged_once() -> None:
    line = line_of([replace(TICKET, cost=500)] * 3 + [replace(TICKET, tenant="b", cost=500)] * 3)
    (first,) = served(line, 1)
    first.refund()
    line.add(first)
    back = served(line)
    assert back[0] is first
    assert tenants(back) == "ababab"


def test_a_parked_one_waits_in_the_queue_and_is_passed_over_until_it_is_due() -> None:
    line = line_of([TICKET])
    parked = Waiter(replace(TICKET, needs="m"), -1)
    line.add(parked, parked=True)
    assert (len(line), line.ahead(0), line.is_wanted("m"), set(line) >= {parked}) == (2, 2, False, True)
    assert [waiter.number for waiter in served(line)] == [0]
    line.unpark(parked)
    line.unpark(parked)
    assert line.is_wanted("m")
    assert served(line) == [parked]
    line.unpark(parked)
    assert (len(line), line.ahead(0)) == (0, 0)


def last_of(waiting: Sequence[str], newest: str) -> str:
    """Names such as `a0` are a tenant and a class; whom the newest, having come last, puts out."""

    def ticket(name: str) -> Ticket:
        return replace(TICKET, tenant=name[0], priority=int(name[1]), weight=2.0 if name[0] == "w" else 1.0)

    line = line_of(map(ticket, waiting))
    newcomer = Waiter(ticket(newest), 99)
    line.add(newcomer)
    last = line.last(newcomer)
    return "newest" if last is newcomer else f"{waiting[last.number]} #{last.number}"


@pytest.mark.parametrize(
    ("waiting", "newest", "last"),
    [
        (["a0", "a0", "a0"], "a0", "newest"),
        (["a1", "a1", "a0"], "b0", "a1 #1"),  # the youngest of the worst class
        (["a0", "a0", "a0"], "b1", "newest"),
        (["a0", "a0", "a0"], "b0", "a0 #2"),  # a flood does not close the queue to others
        (["a0", "a0", "b0"], "b0", "newest"),  # strictly better only
        (["a0", "a0", "a0", "b0"], "b0", "a0 #2"),
        (["w0", "w0", "w0", "b0"], "b0", "newest"),  # twice the weight, twice the room
        (["w0", "w0", "w0", "b0"], "w0", "newest"),
        (["b0", "b0", "b0"], "w0", "b0 #2"),
        ([], "a0", "newest"),
    ],
)
def test_whom_a_full_queue_turns_away(waiting: list[str], newest: str, last: str) -> None:
    assert last_of(waiting, newest) == last


class Watched(str):
    """Counts how often it is looked up."""

    looks = 0

    def __hash__(self) -> int:
        Watched.looks += 1
        return super().__hash__()


@pytest.mark.parametrize("classes", [10, 1000])
def test_a_turn_for_which_nobody_has_room_is_not_looked_for_in_each_class(classes: int) -> None:
    needs = Watched("m")
    line = line_of(replace(TICKET, priority=priority, needs=needs) for priority in range(classes))
    Watched.looks = 0
    assert line.take(needing()) is None
    assert line.is_wanted(needs)
    assert Watched.looks < 10


@pytest.mark.parametrize("count", [100, 1000])
def test_many_are_turned_away_in_a_few_looks_each(count: int) -> None:
    waiters = [
        Waiter(replace(TICKET, tenant=Watched(f"t{number % (count // 2)}"), priority=number % 2), number)
        for number in range(count)
    ]
    line = WaitingLine()
    for waiter in waiters:
        line.add(waiter)
    Watched.looks = 0
    for last in line.lasts(waiters[-1]):
        line.remove(last)
    assert not line
    assert Watched.looks < 20 * count


@given(st.lists(st.tuples(st.sampled_from("abw"), st.integers(0, 2)), min_size=1, max_size=12))
def test_whoever_is_turned_away_next_would_be_after_those_before(waiting: list[tuple[str, int]]) -> None:
    def line() -> tuple[WaitingLine, Waiter]:
        tickets = [replace(TICKET, tenant=who, priority=of, weight=2.0 if who == "w" else 1.0) for who, of in waiting]
        made = line_of(tickets)
        return made, max(made, key=lambda waiter: waiter.number)

    (at_once, newest), (one_by_one, same) = line(), line()
    for waiter in at_once.lasts(newest):
        expected = one_by_one.last(same)
        assert waiter.number == expected.number
        at_once.remove(waiter)
        one_by_one.remove(expected)
    assert not at_once
    assert not one_by_one


def test_shares_forget_tenants_without_a_claim() -> None:
    shares = Shares()
    for number in range(10_000):
        shares.charge(f"t{number}", 1.0)
        shares.charge("busy", 1.0)
    assert len(shares._ends) <= 2 * NEW_TENANTS
    assert shares.ahead("busy") >= 0


class LineMachine(RuleBasedStateMachine):
    """Any order of calls against a plain list: what is there, who may be next, and that nothing is left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.line = WaitingLine()
        self.due: list[Waiter] = []
        self.parked: list[Waiter] = []
        self.out: list[Waiter] = []
        self.numbers = 0

    @rule(
        tenant=st.sampled_from("abc"),
        needs=st.sampled_from("mn"),
        priority=st.integers(0, 2),
        cost=st.integers(0, 100),
        weight=WEIGHTS,
        parked=st.booleans(),
    )
    def add(self, tenant: str, needs: str, priority: int, cost: int, weight: float, parked: bool) -> None:
        ticket = replace(TICKET, tenant=tenant, needs=needs, priority=priority, cost=cost, weight=weight)
        self.numbers += 1
        self._add(Waiter(ticket, self.numbers), parked)

    @rule(which=st.integers(0, 99), parked=st.booleans())
    def come_back(self, which: int, parked: bool) -> None:
        if self.out:
            waiter = self.out.pop(which % len(self.out))
            waiter.refund()
            self._add(waiter, parked)

    def _add(self, waiter: Waiter, parked: bool) -> None:
        self.line.add(waiter, parked=parked)
        (self.parked if parked else self.due).append(waiter)

    @rule(which=st.integers(0, 99), twice=st.booleans())
    def remove(self, which: int, twice: bool) -> None:
        everyone = self.due + self.parked
        if everyone:
            waiter = everyone[which % len(everyone)]
            self.line.remove(waiter)
            if twice:
                self.line.remove(waiter)
            (self.parked if waiter in self.parked else self.due).remove(waiter)

    @rule(which=st.integers(0, 99))
    def unpark(self, which: int) -> None:
        if self.parked:
            waiter = self.parked.pop(which % len(self.parked))
            self.line.unpark(waiter)
            self.due.append(waiter)

    @rule(open_needs=st.sets(st.sampled_from("mn")))
    def take(self, open_needs: set[str]) -> None:
        fitting = [waiter for waiter in self.due if waiter.ticket.needs in open_needs]
        taken = self.line.take(needing(*open_needs))
        if taken is None:
            assert not fitting, "somebody fits and nobody is served"
            return
        assert taken in fitting
        assert taken.ticket.priority == min(waiter.ticket.priority for waiter in fitting)
        same = [
            w for w in fitting if (w.ticket.tenant, w.ticket.priority) == (taken.ticket.tenant, taken.ticket.priority)
        ]
        assert taken.number == min(waiter.number for waiter in same)
        self.due.remove(taken)
        self.out.append(taken)

    @invariant()
    def the_counts_are_right(self) -> None:
        everyone = self.due + self.parked
        assert set(self.line) == set(everyone)
        assert len(self.line) == len(everyone)
        assert self.line.ahead(PRIORITY_LIMIT) == len(everyone)
        assert self.line.ahead(1) == sum(waiter.ticket.priority <= 1 for waiter in everyone)
        for needs in "mn":
            assert self.line.is_wanted(needs) == any(waiter.ticket.needs == needs for waiter in self.due)

    def teardown(self) -> None:
        for waiter in self.due + self.parked:
            self.line.remove(waiter)
        assert not self.line
        assert not self.line._classes


TestLineMachine = LineMachine.TestCase
