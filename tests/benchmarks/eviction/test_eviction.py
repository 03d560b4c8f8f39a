"""What the benchmark on evicting engines counts as wrong, refuted and needed; on simulated engines."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from benchmarks.eviction.conversations import AskedTurn, Shape, asked_turns, scripts, visits
from benchmarks.eviction.engine_counts import EngineCounts, engine_counts, parse
from benchmarks.eviction.modes import ModeRecord, together
from benchmarks.eviction.play import PlayedTurn, Player
from benchmarks.eviction.profile import profile_of
from benchmarks.eviction.report import EvictionRun, decode, encode, needed_tokens, page, table
from benchmarks.overhead.records import Machine
from ppd.proxy.config import Mode
from ppd.proxy.errors import FormatError
from ppd.proxy.laws.step_time import EngineProfile
from tests.support.fleet import Fleet
from tests.support.proxy import ADMIN_KEY

SHAPE = Shape(conversations=3, turns=3, answer_tokens=8)
METRICS = """\
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 100.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="tiny",source="local_compute"} 11.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache_hit"} 64.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 32.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="tiny"} 98304.0
vllm:nixl_bytes_transferred_count{engine="0",model_name="tiny"} 1.0
vllm:kv_block_lifetime_seconds_count{engine="0",model_name="tiny"} 7.0
vllm:kv_block_lifetime_seconds_sum{engine="0",model_name="tiny"} 9.5
"""


def test_each_conversation_speaks_as_often_as_it_has_turns_and_begins_as_no_other() -> None:
    shape = Shape(conversations=8, turns=5)
    assert Counter(visits(shape, seed=4)) == dict.fromkeys(range(8), 5)
    assert list(visits(shape, seed=4)) == list(visits(shape, seed=4)) != sorted(visits(shape, seed=4))
    written = scripts(shape, seed=4)
    assert len({script.questions[0][:3] for script in written}) == 8
    for script in written:
        sizes = [len(question) for question in script.questions]
        assert 250 <= sizes[0] <= 450
        assert all(60 <= size <= 240 for size in sizes[1:])


def test_counters_are_read_by_source_and_over_ranks() -> None:
    counts = parse(METRICS)
    assert counts == EngineCounts(hit=64, pulled=32, computed=111, moved_bytes=98304, evicted_blocks=7)
    assert counts.prompts == 207
    assert counts.since(EngineCounts(hit=60)) + EngineCounts(hit=1) == EngineCounts(5, 32, 111, 98304, 7)
    assert parse("") == EngineCounts()


@pytest.mark.parametrize(
    ("route", "claimed", "cached", "refuted"),
    [
        ("LOCAL", 640, 320, False),
        ("LOCAL", 640, 319, True),
        ("REPLICA", 65, 0, True),
        ("LOCAL", 64, 0, False),  # parts of blocks
        ("SPLIT", 640, 0, False),  # its cached tokens are those that it pulled
    ],
)
def test_a_claim_is_refuted_where_the_engine_had_less_than_half(
    route: str, claimed: int, cached: int, refuted: bool
) -> None:
    turn = played(route=route, claimed_tokens=claimed, cached_tokens=cached)
    assert turn.is_refuted is refuted
    assert record(turn).refuted == int(refuted)


def test_what_conversations_need_is_their_last_prompts_and_answers() -> None:
    turns = [played(conversation=number, prompt_tokens=tokens) for number, tokens in ((0, 50), (1, 70), (0, 90))]
    assert needed_tokens(turns) == 100 + 80


def test_what_is_new_is_what_neither_the_turn_before_had_nor_its_answer() -> None:
    first, second = played(prompt_tokens=50), played(number=1, prompt_tokens=90)
    one = record(first, second, played(conversation=1, prompt_tokens=7))
    assert one.new_tokens == 50 + 30 + 7
    rounds = together([one, msgspec.structs.replace(one, round=1)])
    assert (rounds.new_tokens, rounds.prompt_tokens) == (2 * 87, 2 * 147)


def test_wrong_and_failed_answers_are_told_apart_in_the_table() -> None:
    row = table([record(played(), played(is_right=False), played(status=503, is_right=False))]).splitlines()[-1]
    assert row.endswith("| 1 | 1 |")


def test_records_say_after_a_round_trip_what_they_said_before() -> None:
    rounds = [record(played(), played(number=1)), msgspec.structs.replace(record(played()), round=1)]
    run = EvictionRun(
        date="2026-01-01",
        command="python -m benchmarks.eviction",
        machine=Machine("a CPU", 2, 24, "6.1", "3.11"),
        vllm="0.32.0",
        blocks=64,
        conversations=1,
        turns_each=2,
        needed_tokens=220,
        capacity_tokens=100,
        at_once=1,
        seed=0,
        alone=[record(played(is_right=False))],
        modes=rounds,
        slo_flags={"slo-tpot-s": "0.025", "profile": "here"},
        profile=profile_of(EngineProfile(), 2016),
    )
    data = encode(run)
    assert decode(data) == run
    assert "2 rounds: 220 tokens of KV, 2.2 times what the engines that answer (1) hold together" in page(run)
    assert "wrong texts 1 of 1 (table)" in page(run)
    with pytest.raises(FormatError, match="version 2, known is 1"):
        decode(data.replace(b'"version":1}\n', b'"version":2}\n'))


async def test_turns_through_a_proxy_get_the_right_texts_and_one_altered_text_is_found() -> None:
    async with Fleet.of("P1 D1 R1", mode=Mode.ALWAYS_LOCAL) as fleet:
        urls = {name: f"http://{engine.address}" for name, engine in fleet.engines.items()}
        one = Player(fleet.session, urls["R1"], "sim", SHAPE.answer_tokens, "right")
        turns = await asked_turns(SHAPE, 0, one.text)
        player = Player(fleet.session, fleet.base_url, "sim", SHAPE.answer_tokens, "played", ADMIN_KEY)
        found = await player.play(turns, at_once=2)
        counts = await engine_counts(fleet.session, urls["D1"])
        altered = await player.play([wrong(turns[0]), *turns[1:]], at_once=2)
    assert [turn.is_right for turn in found] == [True] * 9
    assert [turn.is_right for turn in altered] == [False] + [True] * 8
    assert Counter(turn.route for turn in found) == {"SPLIT": 3, "LOCAL": 6}
    assert [(turn.conversation, turn.number) for turn in found] == [(turn.conversation, turn.number) for turn in turns]
    assert all(turn.ttft_s and turn.prompt_tokens and turn.decode == "D1" for turn in found)
    later = [turn for turn in found if turn.number]
    assert all(turn.claimed_tokens and turn.evidence == "own_turns" and not turn.is_refuted for turn in later)
    assert counts.prompts == sum(turn.prompt_tokens for turn in found)


async def test_a_failed_answer_is_not_right() -> None:
    async with Fleet.of("R1", mode=Mode.REPLICA, queue_timeout_s=0.1) as fleet:
        player = Player(fleet.session, fleet.base_url, "sim", SHAPE.answer_tokens, "s", ADMIN_KEY)
        [turn, *_] = await asked_turns(SHAPE, 0, player.text)
        await fleet.kill("R1")
        failed = await player.turn(turn)
    assert failed.status >= 500
    assert not failed.is_right


def wrong(turn: AskedTurn) -> AskedTurn:
    return replace(turn, right=turn.right[:-1] + chr(ord(turn.right[-1]) ^ 1))


def played(**changes: object) -> PlayedTurn:
    usual = {"conversation": 0, "number": 0, "status": 200, "is_right": True, "prompt_tokens": 100, "answer_tokens": 10}
    return PlayedTurn(**{**usual, **changes})  # type: ignore[arg-type]


def record(*turns: PlayedTurn) -> ModeRecord:
    return ModeRecord(mode="table", seconds=1.0, turns=list(turns), engines={"D1": EngineCounts()})
