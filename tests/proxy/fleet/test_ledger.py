"""What all processes do on a worker, in sum, and what engines' reports change of that."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import msgspec
import pytest

from ppd.proxy.fleet.ledger import (
    REPORT_AGE_S,
    Backlog,
    DecodingSequences,
    LegEstimates,
    LegWork,
    Use,
    backlog,
    believed_decoding,
    of_other_proxies,
    prefill_left_s,
    shown,
    summed,
)
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.view import LEAST_PATIENCE_S, NO_PROMPTS, RECENT_S, WorkerView
from ppd.proxy.fleet.worker import Announcement, Load, Role, Worker, WorkerId

D = WorkerId("d:1")
VIEW = WorkerView(worker=Worker(role=Role.DECODE, address=D), name="D1", incarnation="a")
LEG = LegWork(prefill_tokens=100, prefill_s=2.0, placed_tokens=100, context_tokens=110, reserved_tokens=120)

# What a view shows of a use; the rest is for the process that counts it.
KEPT = {"answers", "halvings", "sending", "receiving_s"}
TIMES = {"prefills_since_s", "unseen_prefill_until_s", "sends_free_s", "receives_free_s"}


def used(factor: int) -> Use:
    counts = {name: factor * (1 + at) for at, name in enumerate(Use.__struct_fields__)}
    return Use(**counts | {"recent_prompts": NO_PROMPTS.plus(factor, 1.0, 7.0)})  # type: ignore[arg-type]


def test_a_view_shows_the_sum_of_all_that_processes_count_and_of_times_the_latest() -> None:
    """No field is forgotten on its way."""
    names = Use.__struct_fields__
    ours, theirs = used(10), used(1000)
    view = shown(VIEW, summed(ours, [theirs]))
    for name in set(names) - KEPT:
        own, other = getattr(ours, name), getattr(theirs, name)
        if name == "recent_prompts":
            assert view.recent_prompts == NO_PROMPTS.plus(10, 1.0, 7.0).plus(1000, 1.0, 7.0)
        else:
            assert getattr(view, name) == (max(own, other) if name in TIMES else own + other), name
    assert shown(VIEW, ours) == shown(VIEW, summed(ours, []))


def test_a_use_reaches_another_process_as_it_is() -> None:
    use = Use()
    use.begin(LEG, 1.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(use), type=Use) == use


def test_what_a_killed_process_did_vanishes() -> None:
    registry = Registry()
    registry.apply(Announcement(VIEW.worker), 0.0)
    idle, theirs = registry.views(), Use()
    theirs.begin(LEG, 1.5)
    theirs.begin_sending(9.0)
    theirs.begin_receiving(9.0, 0.5)
    registry.used_by(1, D, theirs)
    view = registry.views()[0]
    assert (view.decoding, view.prefills, view.queued_prefill_s, view.receives_free_s) == (1, 1, 2.0, 9.0)
    registry.ended(1)
    assert registry.views() == idle


def test_fractions_that_are_added_and_taken_leave_nothing() -> None:
    legs = [LegWork(prefill_tokens=1, prefill_s=seconds) for seconds in (0.1, 0.2, 0.3, 1e9)]
    for order in permutations(legs):
        use = Use()
        for leg in legs:
            use.begin(leg, 1.0)
        for leg in order:
            assert use.queued_prefill_s >= 0.0
            use.computed(leg, 2.0)
            use.end(leg)
        assert use == Use(recent_prompts=use.recent_prompts)


@pytest.mark.parametrize(
    ("queued_s", "prefills", "now_s", "left_s"),
    [
        (0.0, 0, 50.0, 0.0),
        (2.0, 1, 10.0, 2.0),
        (2.0, 1, 11.5, 0.5),
        (2.0, 1, 99.0, 0.0),
        (6.0, 3, 11.0, 5.0),
        (6.0, 3, 99.0, 4.0),  # the first is late: the others are still to come
        (6.0, 3, 5.0, 11.0),  # the first waits for its request's host work
    ],
)
def test_the_first_prompt_of_a_queue_is_being_computed(
    queued_s: float, prefills: int, now_s: float, left_s: float
) -> None:
    use = Use(queued_prefill_s=queued_s, prefills=prefills, prefills_since_s=10.0)
    assert prefill_left_s(use, now_s) == prefill_left_s(shown(VIEW, use), now_s) == left_s


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Backlog()),
        ({"decoding": 2, "context_tokens": 3000}, Backlog(decoding_sequences=2, decoding_context_tokens=3000)),
        ({"queued_prefill_s": 2.0, "prefills": 1, "prefills_since_s": 99.5}, Backlog(prefill_left_s=1.5)),  # it runs
        ({"unseen_prefill_until_s": 100.25}, Backlog(prefill_left_s=0.25)),
        ({"reserved_tokens": 5000}, Backlog(reserved_kv_tokens=5000)),
        ({"sends_free_s": 101.0, "receives_free_s": 100.5}, Backlog(link_free_in_s=1.0)),
        ({"sends_free_s": 1.0, "receives_free_s": 100.5}, Backlog(link_free_in_s=0.5)),
        ({"sends_free_s": 99.0, "receives_free_s": 99.0}, Backlog()),
    ],
)
def test_what_operators_are_shown_of_it(changes: dict[str, Any], expected: Backlog) -> None:
    assert backlog(msgspec.structs.replace(VIEW, **changes), 100.0) == expected


def reported(load: Load) -> WorkerView:
    """After its engine's report, which two turns of this proxy are in."""
    before = msgspec.structs.replace(VIEW, inflight=2, decoding=2, context_tokens=3000)
    return msgspec.structs.replace(before, load=load, others=of_other_proxies(before, load), reported_s=100.0)


OWN = DecodingSequences(2, 3000)
FULL: dict[str, Any] = {"kv_usage": 0.5, "kv_capacity_tokens": 20_000}


@pytest.mark.parametrize(
    ("load", "believed"),
    [
        (Load(), OWN),
        (Load(running=2, **FULL), OWN),
        (Load(running=1, **FULL), OWN),  # ours are on their way
        (Load(running=6, **FULL), DecodingSequences(6, 10_000)),
        (Load(running=6, kv_usage=0.1, kv_capacity_tokens=20_000), DecodingSequences(6, 3000)),
        (Load(running=6), DecodingSequences(6, 9000)),  # as long as ours
        (Load(running=3, waiting=5, **FULL), DecodingSequences(5, 10_000)),  # what waits decodes nothing
    ],
)
def test_sequences_of_other_proxies_count_as_the_engine_reports_them(load: Load, believed: DecodingSequences) -> None:
    assert believed_decoding(reported(load), 100.0 + REPORT_AGE_S) == believed
    assert believed_decoding(reported(load), 100.1 + REPORT_AGE_S) == OWN, "the report is old"


def test_turns_that_end_after_a_report_count_no_longer() -> None:
    view = reported(Load(running=3, waiting=1, **FULL))
    assert (view.requests, believed_decoding(view, 100.0).count) == (4, 4)
    left = msgspec.structs.replace(view, inflight=0, decoding=0, context_tokens=0)
    assert left.requests == 2
    assert believed_decoding(left, 100.0) == DecodingSequences(2, 7000), "what others have there"


def test_prompts_that_this_proxy_sent_to_a_p_are_nobody_elses() -> None:
    before = msgspec.structs.replace(VIEW, inflight=3)
    view = msgspec.structs.replace(
        before, others=of_other_proxies(before, Load(running=2, waiting=1, **FULL)), reported_s=100.0
    )
    assert (view.requests, believed_decoding(view, 100.0)) == (3, DecodingSequences(0, 0))


def test_prompts_that_other_proxies_sent_to_a_p_are_requests_and_no_streams() -> None:
    p = msgspec.structs.replace(VIEW, worker=Worker(role=Role.PREFILL, address=D))
    view = msgspec.structs.replace(p, others=of_other_proxies(p, Load(running=2, waiting=1, **FULL)), reported_s=100.0)
    assert (view.requests, believed_decoding(view, 100.0)) == (3, DecodingSequences(0, 0))


def test_what_others_had_long_ago_is_forgotten_as_the_engine_reports_no_more() -> None:
    """Else a worker whose metrics fail once in a burst of another proxy's would be shunned for ever."""
    registry, silent = Registry(), Announcement(VIEW.worker)
    registry.apply(Announcement(VIEW.worker, Load(running=40, waiting=10, **FULL)), 0.0)
    registry.apply(silent, REPORT_AGE_S)
    assert registry.views()[0].requests == 50
    registry.apply(silent, REPORT_AGE_S + 0.1)
    assert registry.views()[0].requests == 0
    registry.apply(Announcement(VIEW.worker, Load(running=40)), 60.0)
    registry.apply(Announcement(VIEW.worker, Load(running=-1)), 61.0 + REPORT_AGE_S)
    assert registry.views()[0].requests == 0, "nor does one that cannot be tell of any"


ABSURD = [
    {"kv_usage": math.nan},
    {"kv_usage": math.inf},
    {"kv_usage": -0.1},
    {"kv_usage": 1.01},
    {"running": -1},
    {"running": 20_001},  # more than there are tokens of KV
    {"running": 10**300, "kv_capacity_tokens": 0},
    {"waiting": -1},
    {"waiting": 10**300},
    {"kv_capacity_tokens": -1},
    {"kv_capacity_tokens": 10**30},
]


@pytest.mark.parametrize("absurd", ABSURD)
def test_a_report_that_cannot_be_leaves_the_last_one(absurd: dict[str, Any]) -> None:
    registry, good = Registry(), Load(running=6, **FULL)
    registry.apply(Announcement(VIEW.worker, good), 1.0)
    registry.apply(Announcement(VIEW.worker, Load(**{"running": 6, **FULL, **absurd})), 2.0)
    registry.apply(Announcement(VIEW.worker), 3.0)
    kept = registry.views()[0]
    assert (kept.load, kept.reported_s, kept.heard_s) == (good, 1.0, 3.0), "and says how old it is"
    registry.loaded(D, good, 4.0)
    assert registry.views()[0].reported_s == 4.0


def test_recent_prompts_count_ever_less() -> None:
    first = NO_PROMPTS.plus(3.0, 0.5, 100.0)
    assert (first.busy, first.rate, first.patience_s) == pytest.approx((3.0 / RECENT_S, 1.0 / RECENT_S, 0.5))
    later = first.plus(3.0, 0.5, 100.0 + RECENT_S)
    assert (later.busy, later.rate, later.patience_s) == pytest.approx(
        (first.busy * (1 / math.e + 1), first.rate * (1 / math.e + 1), 0.5)
    )


def test_recent_prompts_of_two_processes_are_their_sum_whoever_was_heard_last() -> None:
    one, two = NO_PROMPTS.plus(3.0, 0.5, 100.0), NO_PROMPTS.plus(1.0, 2.0, 130.0)
    assert one.joined(two) == two.joined(one)
    assert one.joined(two).busy == pytest.approx(one.busy * one.left(130.0) + two.busy)


@pytest.mark.parametrize("now_s", [-5.0, 0.0, 99.9])
def test_a_clock_that_went_back_forgets_no_prompt(now_s: float) -> None:
    recent = NO_PROMPTS.plus(3.0, 0.5, 100.0)
    again = recent.plus(3.0, 0.5, now_s)
    assert (again.at_s, again.busy, again.rate) == pytest.approx((100.0, 2 * recent.busy, 2 * recent.rate))


@pytest.mark.parametrize("patience_s", [0.0, -1.0, math.inf, math.nan])
def test_patience_is_bounded(patience_s: float) -> None:
    recent = NO_PROMPTS.plus(1.0, patience_s, 1.0)
    assert recent.patience_s == (math.inf if patience_s == math.inf else LEAST_PATIENCE_S)


@pytest.mark.parametrize(
    "name", ["prompt_tokens", "new_tokens", "output_tokens", "new_on_prefill_tokens", "fetched_tokens"]
)
@pytest.mark.parametrize(("estimate", "possible"), [(7, 7), (-1, 0), (1 << 41, 1 << 40)])
def test_tokens_that_cannot_be_are_kept_within_limits(name: str, estimate: int, possible: int) -> None:
    fields: dict[str, Any] = {"prompt_tokens": 1, "new_tokens": 1, name: estimate}
    assert getattr(LegEstimates(**fields).possible(), name) == possible


@pytest.mark.parametrize("name", ["prefill_s", "beside_s", "fetch_link_s", "link_s", "ready_s"])
@pytest.mark.parametrize(("estimate_s", "possible_s"), [(0.5, 0.5), (-1.0, 0.0), (math.nan, 0.0), (3601.0, 0.0)])
def test_seconds_that_cannot_be_count_as_none(name: str, estimate_s: float, possible_s: float) -> None:
    fields: dict[str, Any] = {"prompt_tokens": 1, "new_tokens": 1, name: estimate_s}
    assert getattr(LegEstimates(**fields).possible(), name) == possible_s
