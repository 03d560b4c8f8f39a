"""Whole runs in virtual time: what the records say where belief and truth are known."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
import pytest

from benchmarks.recognition import figures, forms, replays, templates, tokens
from benchmarks.recognition.engines.kv_events import EventSetup
from benchmarks.recognition.engines.workers import Job, TimedWorker, VirtualTime
from benchmarks.recognition.play import FleetSetup, Language, Play, TurnRecord, spread
from benchmarks.recognition.replays import Text, TracedRequest
from benchmarks.recognition.requests import MODEL, Asked, said
from benchmarks.recognition.routings import Processes
from ppd.proxy.beliefs.held import PromptEntry
from ppd.proxy.fleet.worker import Role
from ppd.proxy.policy import Route
from ppd.servers.sim.core.config import EventEncoding

LANGUAGE = Language(tokenizer=tokens.by_pieces(), template=templates.qwen)


def play(sessions: Sequence[Sequence[Asked]], shape: str = "1P_1D", **setup: object) -> tuple[Play, list[TurnRecord]]:
    one = Play(sessions, LANGUAGE, FleetSetup(**{"shape": shape, "capacity_tokens": 50_000, **setup}))  # type: ignore[arg-type]
    return one, sorted(one.run(), key=lambda record: (record.session, record.number))


def grows(seed: str) -> list[Asked]:
    return [*forms.grows(Random(seed))]


@pytest.mark.parametrize("shape", ["1P_1D", "2P_2D", "4R"])
def test_on_a_history_that_grows_every_follow_up_goes_where_it_is_held(shape: str) -> None:
    one, records = play([grows("a"), grows("b"), grows("c")], shape)
    found = figures.figures(records, spread(one.workers))
    assert (found.right, found.lost, found.harm) == (1.0, 0.0, 0.0)
    assert found.local == (None if shape == "4R" else 1.0)
    assert found.reused == pytest.approx(found.possible)
    assert all(record.held == record.best for record in records if record.follows)


def test_a_first_turn_is_computed_by_p_and_pulled_by_d() -> None:
    one, records = play([grows("a")[:1]])
    prefill, decode = one.workers
    assert [record.route for record in records] == [Route.SPLIT]
    assert (prefill.computed_tokens, decode.computed_tokens) == (records[0].prompt, 0)
    assert decode.cache.usage == prefill.cache.usage == 0.0


def test_a_cache_that_is_too_small_does_harm() -> None:
    sessions = [[*forms.grows(Random(f"{seed}"))] for seed in range(5)]
    _, ample = play(sessions, at_once=5)
    _, small = play(sessions, at_once=5, capacity_tokens=4_000)
    harm = [figures.figures(records, 1.0).harm or 0.0 for records in (ample, small)]
    assert harm[0] == 0.0
    assert harm[1] > 0.0


def tight(**events: object) -> list[TurnRecord]:
    sessions = [grows(f"{seed}")[:5] for seed in range(6)]
    setup = EventSetup(**events) if events else None  # type: ignore[arg-type]
    return play(sessions, at_once=6, capacity_tokens=7_000, events=setup)[1]


def test_by_events_a_cache_that_is_too_small_does_no_harm() -> None:
    own, heard = (figures.figures(tight(**events), 1.0) for events in ({}, {"delay_s": 0.05}))
    assert (own.harm or 0.0) > (heard.harm or 0.0) == 0.0
    assert heard.claimed == pytest.approx(heard.there, abs=0.01)


@pytest.mark.parametrize("events", [{"delay_s": 30.0}, {"encoding": EventEncoding.ARRAY}])
def test_events_that_are_late_or_name_no_session_leave_all_to_own_turns(events: dict[str, object]) -> None:
    assert tight(**events) == tight()


def test_a_clairvoyant_computes_no_more_than_others() -> None:
    sessions = [[*forms.reminder(Random(f"{seed}"))] for seed in range(4)]
    computed = {
        routing: sum(record.computed for record in play(sessions, "4R", routing=routing)[1])
        for routing in ("clairvoyant", "ppd", "round robin")
    }
    assert computed["clairvoyant"] == min(computed.values())


def test_a_prompt_waits_for_room_and_one_that_never_fits_is_refused() -> None:
    time, begun = VirtualTime(), list[str]()
    worker = TimedWorker("D1", Role.DECODE, 64, time)

    def job(name: str, prompt_tokens: int) -> Job:
        keys = [hash((name, at)) for at in range(prompt_tokens // 16)]
        return Job(
            keys=keys,
            whole=keys,
            prompt_tokens=prompt_tokens,
            output_tokens=8,
            began=lambda cached: begun.append(f"{name} {cached} {worker.load.running}"),
        )

    for name in ("one", "other", "one"):
        worker.ask(job(name, 40))
    assert worker.load.waiting == 2
    time.run()
    assert begun == ["one 0 1", "other 0 1", "one 16 1"]  # the other's blocks took the place of its tail
    worker.ask(job("one", 40))
    with pytest.raises(ValueError, match="does not fit"):
        worker.ask(job("huge", 80))
        time.run()


def traced(*blocks: Sequence[int]) -> list[Asked]:
    requests = [TracedRequest(blocks=one, output_blocks=1) for one in blocks]
    return [*replays.requests(requests, 1, Text(4, "a trace"))]


@pytest.mark.parametrize(
    ("second", "roles", "follows"),
    [
        ([1, 2, 3, 4, 5], ["system", "user", "assistant", "user"], True),
        ([1, 2, 8, 9], ["system", "user"], True),  # cut in the middle of a message
        ([1, 7, 8], ["system", "user"], False),  # only the head is the same
        ([7, 8], ["system", "user"], False),
    ],
)
def test_a_trace_of_blocks_becomes_the_requests_that_share_them(
    second: list[int], roles: list[str], follows: bool
) -> None:
    first, then = traced([1, 2, 3], second)
    text = Text(4, "a trace")
    assert [message["role"] for message in then.messages] == roles
    assert "".join(message["content"] for message in then.messages) == text(second)
    assert then.follows is follows
    if len(roles) == 4:
        assert then.messages[:3] == [*first.messages, first.reply]


def record(**values: object) -> TurnRecord:
    given = {"session": 1, "number": 2, "follows": True, "is_users": True, "route": Route.LOCAL, "decode": "D1"}
    held = {"claimed": 1000, "believed_prompt": 1100, "believed_output": 100, "prompt": 1100, "computed": 108}
    return TurnRecord(**{**given, **held, "best": 992, "chosen": 992, "possible": 992, "held": 992, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "figure", "expected"),
    [
        ({}, "harm", 0.0),
        ({"held": 496}, "harm", 1.0),
        ({"held": 512}, "harm", 0.0),
        ({"held": 0, "route": Route.SPLIT}, "harm", 0.0),  # a handoff has what it was promised from P
        ({"chosen": 900}, "right", 0.0),
        ({"kind": "lost"}, "lost", 1.0),
        ({"kind": "branch"}, "lost", 0.0),
        ({}, "claimed", 1000 / 1100),
        ({}, "reused", 1 - 108 / 1100),
        ({}, "estimate", 0.0),
        ({"believed_prompt": 1150}, "estimate", 0.5),
        ({"believed_prompt": 1150, "held": 0}, "estimate", None),
        ({}, "flips", 0.0),
        ({"claimed": None}, "flips", None),
        ({"follows": False}, "local", None),
        ({"follows": False, "computed": 550}, "first", 0.5),
        ({}, "first", None),
    ],
)
def test_figures_of_one_turn(values: dict[str, object], figure: str, expected: float | None) -> None:
    found = getattr(figures.figures([record(**values)], 1.0), figure)
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("key", [1, 2])
def test_several_processes_that_break_ties_alike_decide_as_one_does(key: int) -> None:
    sessions = [grows(f"{seed}") for seed in range(8)]
    one, three = (
        play(sessions, "2P_2D", at_once=4, routing=routing, key=key)[1] for routing in ("ppd", "ppd x 3, same ties")
    )
    assert {turn.decode for turn in one} == {"D1", "D2"}
    placed = [
        [(turn.session, turn.route, turn.decode, turn.claimed, turn.computed) for turn in run] for run in (one, three)
    ]
    assert placed[0] == placed[1]


def test_a_session_of_the_trace_is_asked_in_the_words_of_its_blocks() -> None:
    words = Text(4, "a trace")
    assert words([5]) == words([5]) != words([6])
    assert tokens.count(LANGUAGE.tokenizer(words([5, 6]))) == 8
    assert traced([1, 2])[0].messages[0] == said("system", words([1]))


def test_all_processes_come_to_the_same_beliefs() -> None:
    """Where caches are too small for what runs, so that what fits is learned from answers."""
    sessions = [grows(f"{seed}") for seed in range(10)]
    one, _ = play(sessions, "1P_2D", at_once=6, capacity_tokens=4_000, routing="ppd x 3")
    assert isinstance(one._routing, Processes)
    states = [process._state for process in one._routing.processes]
    assert len({state.tokens.estimate(MODEL, (1, 2, 5, 3000)) for state in states}) == 1
    views = states[0].registry.fleet(MODEL).views
    found = [
        {
            (session.history, worker): held.tokens
            for session in states[0].sessions.all()
            for worker, held in state.beliefs.held(views, PromptEntry(session.history, session.history), 4_000).items()
        }
        for state in states
    ]
    assert found[0]
    assert found == [pytest.approx(found[0], abs=64)] * 3
    capacities = [state.beliefs.capacities() for state in states]
    assert min(capacities[0].values()) < 4_000
    assert capacities == [pytest.approx(capacities[0], abs=64)] * 3


@pytest.mark.parametrize(
    ("runs", "differs", "within"),
    [
        ([0.90, 0.80, 0.91, 0.79], "+0.0 ± 0.0", "yes"),  # whatever the spread of the runs themselves
        ([0.905, 0.805, 0.913, 0.797], "+0.5 ± 0.2", "yes"),
        ([0.93, 0.83, 0.94, 0.82], "+3.0 ± 0.0", "no"),
        ([0.94, 0.78, 0.95, 0.77], "+1.0 ± 3.5", "open"),
        ([0.93, 0.83, 0.91, 0.79], "+1.5 ± 1.7", "open"),
    ],
)
def test_runs_are_compared_in_pairs_and_chance_is_named(runs: list[float], differs: str, within: str) -> None:
    base = figures.figures([record()], 1.0)
    others = [msgspec.structs.replace(base, local=local) for local in (0.90, 0.80, 0.91, 0.79)]
    own = [msgspec.structs.replace(base, local=local) for local in runs]
    cells = dict(zip(figures.SPREAD_HEADS, figures.spread_cells(own, others), strict=True))
    assert cells["LOCAL %"].endswith(f"), {differs}")
    assert (cells["harm %"], cells["within 1 %"]) == ("0.00 (0.00), +0.00 ± 0.00", within)


def test_one_run_says_nothing_of_chance() -> None:
    one = [figures.figures([record()], 1.0)]
    assert figures.spread_cells(one, one)[-1] == "open"
    assert figures.spread_cells(one, None)[-1] == "-"


def test_another_key_is_another_run_of_the_same_requests() -> None:
    sessions = [grows(f"{seed}")[:4] for seed in range(6)]
    runs = [play(sessions, "2P_2D", at_once=3, routing="ppd x 2", key=key)[1] for key in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert [one.prompt for one in runs[0]] == [one.prompt for one in runs[2]]
