"""What processes ask and send each other, over nothing but their socket pairs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ppd.proxy.app.peer_commands import Add, run_command
from ppd.proxy.assembly import Proxy, assemble
from ppd.proxy.config import Mode, ProxyConfig
from ppd.proxy.errors import NotFound, PPDError
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.ledger import LegEstimates, LegWork, Use
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.peers import membership as module
from ppd.proxy.peers.channels import Channels, Member, make_ends
from ppd.proxy.peers.events import (
    CircuitChanged,
    ConfigChanged,
    Event,
    Joined,
    JoinReply,
    PeerAnswer,
    SnapshotEnd,
    SnapshotRequest,
    WorkerGone,
    WorkersPresent,
)
from ppd.proxy.sessions.hasher import Hasher
from ppd.proxy.sessions.prefix_chain import Chain, Marks
from ppd.proxy.sessions.rendered_replies import Doubt
from ppd.proxy.sessions.templates import TemplateOrder
from ppd.proxy.settings import Settings
from tests.support.processes import R1, Pair, worker

pytestmark = pytest.mark.slow


@pytest.fixture
def pair() -> Iterator[Pair]:
    one = Pair()
    yield one
    one.close()


async def test_what_an_operator_did_is_in_the_others_sockets_before_he_is_answered(pair: Pair) -> None:
    """His next request may land on another process, which hears what was sent to it before that."""
    await pair.join()
    one, two = pair.ones
    one.membership.config_changed({"w_ttft": 7.5})
    two.membership.catch_up()
    assert two.settings.config.w_ttft == 7.5
    await pair.hush()


async def test_a_setting_is_of_the_same_type_at_all(pair: Pair) -> None:
    await pair.join()
    one, two = pair.ones
    wanted = {"mode": Mode.ALWAYS_SPLIT, "w_ttft": 2.0}
    one.change(wanted)
    one.membership.config_changed(wanted)
    one.membership._channels.flush()
    two.membership.catch_up()
    assert two.chooser.rules.mode is Mode.ALWAYS_SPLIT
    assert one.settings.config == two.settings.config
    await pair.hush()


async def test_an_answer_to_a_predecessors_question_is_not_taken_for_ones_own(pair: Pair) -> None:
    """The question was asked by one that died; its answer comes when its successor has asked something else."""
    await pair.join()
    one, two = pair.ones
    two.membership.handlers["what"] = lambda about: b"the answer to " + about
    old_number = next(one.membership._numbers)
    one.membership._channels.close()  # or it might take what comes for its successor
    pair.ones[0] = successor = pair.begin(0)
    successor.membership._channels.open()
    asking = asyncio.create_task(successor.membership._ask(1, "what", b"this"))
    Channels(pair.ends[1], {}, lambda _: None).send(0, [PeerAnswer(old_number, b"the answer to that")])
    assert await asking == b"the answer to this"
    await pair.hush()


async def test_what_was_asked_of_a_leader_that_died_is_refused_by_its_successor(pair: Pair) -> None:
    """Or what it tells the others of its fleet would be all that they know of theirs."""
    pair.ones[0].membership.handlers["workers"] = partial(run_command, pair.ones[0])
    await pair.join()
    other = pair.ones[1].membership
    await other.ask_leader("workers", msgspec.msgpack.encode(Add("R=r1:1")))
    pair.ones[0].membership._channels.close()
    asking = asyncio.create_task(other.ask_leader("workers", msgspec.msgpack.encode(Add("R=r2:1"))))
    await asyncio.sleep(0)
    pair.ones[0] = successor = pair.begin(0)
    successor.membership.handlers["workers"] = partial(run_command, successor)
    await successor.membership.join()
    with pytest.raises(PPDError, match="try again"):
        await asking
    for one in pair.ones:
        one.membership.catch_up()
        assert one.settings.added == {"r1:1"} == {view.id for view in one.state.registry.views()}
    await pair.hush()


async def test_what_another_cannot_do_is_raised_here_as_there(pair: Pair) -> None:
    await pair.join()

    def refuse(about: bytes) -> bytes:
        raise NotFound("no such thing", param="thing", code="gone")

    pair.ones[0].membership.handlers["what"] = refuse
    with pytest.raises(PPDError) as caught:
        await pair.ones[1].membership.ask_leader("what", b"")
    raised = caught.value
    assert (raised.status, raised.message, raised.param, raised.code) == (404, "no such thing", "thing", "gone")
    await pair.hush()


async def test_one_that_is_silent_is_told_so_and_forgotten(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.01)
    pair.ones[0].membership._channels.open()
    with pytest.raises(module.ProcessSilent):
        await pair.ones[0].membership._ask(1, "what", b"")
    assert not pair.ones[0].membership._asked
    assert await pair.ones[0].membership.ask_others("what") == {}


async def test_alone_nobody_is_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPLY_S", 0.01)
    await pair.ones[0].membership.join()
    assert pair.ones[0].membership.leads


async def test_what_another_knows_that_reacted_too_late_is_heard_all_the_same(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others hung when this one began; one of them goes on later."""
    await pair.join()
    monkeypatch.setattr(module, "REPLY_S", 0.01)
    worker(pair.ones[1].state.registry)
    pair.ones[1].membership._channels.close()
    pair.ones[0] = successor = pair.begin(0)
    await successor.membership.join()
    assert not successor.state.registry.views()
    for _ in range(20):
        pair.ones[1].membership.catch_up()
        await asyncio.sleep(0)
        successor.membership.catch_up()
    assert [view.id for view in successor.state.registry.views()] == [R1]
    await pair.hush()


async def test_who_missed_that_a_worker_went_hears_it_when_it_is_told_everything(pair: Pair) -> None:
    await pair.join()
    one, two = pair.ones
    for address in ("r1:1", "r2:1"):
        worker(one.state.registry, address)
    one.membership._channels.flush()
    two.membership.catch_up()
    assert {view.id for view in two.state.registry.views()} == {"r1:1", "r2:1"}
    one.state.registry.replicated, replicated = None, one.state.registry.replicated
    one.state.registry.remove(WorkerId("r2:1"))  # told, but lost with what it did not read in time
    one.state.registry.replicated = replicated
    one.membership._lost(1)
    for _ in range(20):
        await asyncio.sleep(0)
        two.membership.catch_up()  # and raises nothing
    assert {view.id for view in two.state.registry.views()} == {"r1:1"}
    await pair.hush()


# -- the fleet as others tell of it


async def test_the_leader_hears_of_answers_that_others_get(pair: Pair) -> None:
    """It alone probes, and what a worker does for any process's turns outranks its probes."""
    await pair.join()
    one, two = pair.ones
    worker(one.state.registry)
    one.membership._channels.flush()
    two.membership.catch_up()
    for answers in (1, 2):
        two.state.registry.answered(R1)
        two.membership._channels.flush()
        one.membership.catch_up()
        assert one.state.registry.answers(R1) == answers
    await pair.hush()


async def test_what_a_process_has_booked_counts_in_all_until_it_dies(pair: Pair) -> None:
    await pair.join()
    one, two = pair.ones
    worker(one.state.registry)
    one.membership._channels.flush()
    two.membership.catch_up()
    idle = one.state.registry.view(R1)
    estimates = LegEstimates(prompt_tokens=100, new_tokens=40, output_tokens=20, prefill_s=2.0)
    booking = LegBooking(two.state.registry, R1, None, estimates)
    booking.reserve(1.0)
    two.membership._channels.flush()
    one.membership.catch_up()
    there, here = (each.state.registry.view(R1) for each in pair.ones)
    assert here is not None and (here.decoding, here.queued_prefill_s) == (1, 2.0)
    assert there == here != idle
    two.membership._channels.close()
    pair.ones[1] = pair.begin(1)
    await asyncio.gather(pair.ones[1].membership.join(), catching_up(one, 20))
    left = one.state.registry.view(R1)
    assert left is not None and idle is not None
    assert replace(left, placed_tokens=0, recent_tokens=0) == idle
    await pair.hush()


async def test_what_is_done_on_workers_that_are_gone_for_good_is_forgotten() -> None:
    registry = Registry()
    for number in range(50):
        one = worker(registry, f"r{number}:1")
        registry.used_by(1, one, Use(1, 0, 10))
        registry.remove(one)
    assert not list(registry.others())


async def test_a_worker_that_went_and_came_back_is_as_busy_as_it_is(pair: Pair) -> None:
    await pair.join()
    one, two = pair.ones

    def heard() -> list[Any]:
        for _ in range(3):
            for each in pair.ones:
                each.membership._channels.flush()
                each.membership.catch_up()
        views = [each.state.registry.view(R1) for each in pair.ones]
        return [
            view and (view.name, view.inflight, view.incarnation, view.placed_tokens, view.recent_tokens)
            for view in views
        ]

    worker(one.state.registry)
    assert heard()[0] == heard()[1]
    leg = LegWork(prefill_tokens=5, placed_tokens=100)
    used = two.state.registry.begin(R1, leg, 0.0)
    assert used is not None
    first = heard()
    assert first[0] == first[1]
    assert (first[0][1], first[0][-1]) == (1, 100)
    one.state.registry.remove(R1)
    assert heard() == [None, None]
    used.end(leg)
    two.state.registry.use_changed(R1, used, legs=True)
    worker(one.state.registry)
    again = heard()
    assert again[0] == again[1]
    assert again[0][1] == 0
    assert again[0][0] == first[0][0]
    assert again[0][2] != first[0][2]
    await pair.hush()


@pytest.mark.parametrize(
    "event", [WorkerGone(WorkerId("none:1")), CircuitChanged(R1, None), ConfigChanged({})], ids=str
)
async def test_news_of_what_is_not_known_harm_nobody(pair: Pair, event: Any, caplog: pytest.LogCaptureFixture) -> None:
    await pair.join()
    pair.ones[0].membership._channels.send(1, [event])
    pair.ones[1].membership.catch_up()
    assert not caplog.records
    await pair.hush()


async def test_one_that_has_just_started_asks_another_when_its_source_dies() -> None:
    ends = make_ends(3)
    heard: dict[int, list[Event]] = {0: [], 1: []}

    def listener(index: int) -> Channels:
        return Channels(ends[index], defaultdict(lambda: lambda _, event: heard[index].append(event)), lambda _: None)

    channels = {index: listener(index) for index in heard}

    async def said(index: int, kind: type[Event]) -> Any:
        async with asyncio.timeout(60):
            while not any(isinstance(event, kind) for event in heard[index]):
                channels[index].drain()
                await asyncio.sleep(0.001)
        return next(event for event in heard[index] if isinstance(event, kind))

    newcomer = assemble(Settings(ProxyConfig(heartbeat_port=0)), member=Member(index=2, ends=ends[2]))
    joining = asyncio.create_task(newcomer.membership.join())
    life = (await said(0, Joined)).life
    channels[0].send(2, [JoinReply(life, True)])
    await said(0, SnapshotRequest)
    await said(1, Joined)
    heard[1].clear()
    channels[0].send(2, [Joined(1)])  # its successor, which knows nothing
    await said(1, Joined)
    channels[1].send(2, [JoinReply(life, True)])
    await said(1, SnapshotRequest)
    channels[1].send(2, [SnapshotEnd(life)])
    async with asyncio.timeout(60):
        await joining
    await newcomer.membership.close()
    newcomer.listener.close()
    for end in (end for of_one in ends for end in of_one.values()):
        end.close()


async def test_what_one_learns_of_a_template_all_know_and_those_that_come(pair: Pair) -> None:
    await pair.join()
    one, two = pair.ones
    learned = one.state.templates
    learned.adopt("m", 3)  # learned of another: not told again
    two.membership.catch_up()
    assert not two.state.templates.known.tools_first
    teach(learned, "n")
    teach(two.state.templates, "o")
    doubt = Doubt(1000, 2000, is_reasoned=True, round_is_over=False)
    one.state.sessions.rendered.learn("m", doubt, 2100, 2000)
    for process in pair.ones:
        process.membership._channels.flush()
    for process in pair.ones:
        process.membership.catch_up()
    assert learned.known.tools_first == {"m", "n", "o"}
    assert two.state.templates.known.tools_first == {"n", "o"}
    assert two.state.sessions.rendered.keeps("m", doubt)
    two.membership._channels.close()
    pair.ones[1] = successor = pair.begin(1)
    await asyncio.gather(successor.membership.join(), catching_up(one, 20))
    successor.membership.catch_up()
    assert successor.state.templates.known.tools_first == {"m", "n", "o"}
    assert successor.state.sessions.rendered.keeps("m", doubt)
    await pair.hush()


async def catching_up(one: Proxy, times: int) -> None:
    for _ in range(times):
        one.membership.catch_up()
        await asyncio.sleep(0)


def teach(order: TemplateOrder, model: str) -> None:
    for text, cached in ((1, 0), (2, 250)):
        chain = Chain((9, 9 ^ text, 9 ^ text ^ 64, 5), (0, 400, 1400, 1600), Hasher(bytes(16)), marks=Marks(2, 1))
        order.learn(model, R1, chain, 400, cached)


async def test_who_is_left_of_a_large_fleet_is_found_in_a_few_looks_each(pair: Pair) -> None:
    class Id(str):
        compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Id.compared += 1
            return super().__eq__(other)

    proxy, count = pair.ones[0], 500
    for number in range(count):
        worker(proxy.state.registry, f"r:{number}")
    left = [WorkerId(Id(f"r:{number}")) for number in range(1, count)]
    replication = proxy.membership._replication
    replication.appliers[WorkersPresent](1, WorkersPresent(left))
    assert len(proxy.state.registry) == count - 1
    assert Id.compared < 10 * count
    await pair.hush()
