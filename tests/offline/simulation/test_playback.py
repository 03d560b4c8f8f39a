"""Sessions of traces in virtual time: histories that grow, are cut or edited, blocks that sessions share, windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from ppd.offline.simulation.clients import UNFINISHED
from ppd.offline.simulation.playback import Playback, Window
from ppd.offline.simulation.routing import ProxySetup
from ppd.offline.simulation.setup import Setup
from ppd.offline.simulation.simulate import play
from ppd.offline.simulation.traced_prompts import TracedPrompts, traced_prompts
from ppd.offline.traces.formats import read
from ppd.offline.traces.turns import Message, RecordedPrompt, TracedConversation, TracedTurn, runs_of
from ppd.proxy.config import Mode
from ppd.proxy.errors import ConfigError
from tests.support.decisions import rules
from tests.support.stepped_engine import profile_of

SAMPLES = Path(__file__).parents[2] / "data" / "traces"
SETUP = Setup(profile=profile_of())
LOCAL = ProxySetup(rules=rules(Mode.ALWAYS_LOCAL))
BLOCK = 64


def turn(ids: Sequence[int], output: int = 10, *, tokens: int | None = None, **settings: object) -> TracedTurn:
    """A turn whose prompt is these blocks, or the first `tokens` tokens of them."""
    prompt = RecordedPrompt(tokens or len(ids) * BLOCK, runs_of(ids), BLOCK)
    return TracedTurn(new_tokens=1, output_tokens=output, prompt=prompt, **settings)  # type: ignore[arg-type]


def trace(*conversations: Sequence[TracedTurn], **settings: float) -> TracedPrompts:
    traced = [TracedConversation(str(at), None, tuple(turns)) for at, turns in enumerate(conversations)]
    return traced_prompts(traced, **settings)  # type: ignore[arg-type]


def cached(prompts: TracedPrompts, topology: str = "1R", **settings: object) -> list[list[int | None]]:
    """Cached tokens of each session's turns, of as many sessions as the trace has."""
    sessions = len(prompts.conversations)
    played = played_of(prompts, topology, sessions=sessions, later_turns=prompts.later_turns, **settings)
    rows: dict[int, list[int | None]] = {}
    for one in played.played:
        rows.setdefault(one.record.conversation, []).append(one.record.cached_tokens)
    return list(rows.values())[:sessions]


def played_of(prompts: TracedPrompts, topology: str = "1R", **settings: object) -> Window:
    return play(prompts, Playback(**({"rate": 0.1, "warm_up_s": 0.0} | settings)), topology, SETUP, LOCAL)  # type: ignore[arg-type]


HISTORY = tuple(range(10))


@pytest.mark.parametrize(
    ("second", "hit"),
    [
        (turn((*HISTORY, 10, 11)), 640),  # the answer of 10 tokens is in it: a hit of 649 tokens is 640 in whole blocks
        (turn((*HISTORY[:6], 20, 21, 22, 23, 24)), 384),  # edited after six blocks
        (turn(HISTORY[:4]), 240),  # cut; its last token is computed again, and hits are whole blocks
        (turn((30, 31, 32)), 0),  # another history
        (turn(HISTORY), 624),  # the same again
    ],
)
def test_a_turn_finds_as_much_of_its_history_as_it_repeats(second: TracedTurn, hit: int) -> None:
    assert cached(trace([turn(HISTORY), second])) == [[0, hit]]


def test_an_answer_is_found_where_the_next_prompt_repeats_it() -> None:
    grown = turn(range(14), tokens=860)
    assert cached(trace([turn(HISTORY, 200), grown])) == [[0, 832]]  # 640 + 200 - 1, in blocks of 16
    too_short = turn(range(11), tokens=700)  # the answer had 200 tokens, so it is not in it
    assert cached(trace([turn(HISTORY, 200), too_short])) == [[0, 640]]


def test_a_prompt_that_ends_inside_a_block_is_continued_by_the_next_one() -> None:
    """The unfinished block has an id of its own, which changes with what follows."""
    first = turn((*HISTORY[:9], 99), tokens=600)
    assert cached(trace([first, turn((*HISTORY, 10, 11))])) == [[0, 608]]


def test_sessions_share_the_blocks_with_which_they_begin() -> None:
    other = turn((*HISTORY[:7], 50, 51))
    assert cached(trace([turn(HISTORY)], [other], [turn((60, 61))]), seed=3) in (
        [[0], [448], [0]],
        [[0], [0], [448]],
    )


def test_ids_of_another_scope_are_other_tokens() -> None:
    def scoped(scope: str) -> TracedTurn:
        return replace(turn(HISTORY), prompt=RecordedPrompt(640, ((0, 10),), BLOCK, scope))

    assert cached(trace([scoped("a")], [scoped("b")])) == [[0], [0]]
    assert sorted(cached(trace([scoped("a")], [scoped("a")])), key=str) == [[0], [624]]


def test_a_second_copy_of_a_trace_shares_nothing_with_the_first() -> None:
    played = played_of(trace([turn(HISTORY)]), sessions=3, later_turns=0).played
    assert [one.record.cached_tokens for one in played] == [0, 0, 0]


def test_the_proxy_knows_a_history_again_and_where_it_was_edited() -> None:
    """An edit of the third turn is a branch at it, LOCAL where the rest is; what shares little is a first turn."""
    turns = [turn(HISTORY), turn(range(14)), turn(range(18)), turn((*range(16), 20)), turn((*range(3), *range(30, 37)))]
    played = played_of(trace(turns), "1P_2D", sessions=1, later_turns=4).played[:5]
    assert [one.record.route for one in played] == ["SPLIT", "LOCAL", "LOCAL", "LOCAL", "SPLIT"]
    assert len({one.record.decode for one in played[:4]}) == 1
    assert [one.record.cached_tokens for one in played[:4]] == [0, 640, 896, 1024]
    assert [one.known_tokens for one in played] == [0, 650, 906, 1024, 192]


def test_what_many_sessions_begin_with_is_their_system_prompt() -> None:
    """So a session that has only that in common with others is new to the proxy: its first turn is SPLIT."""
    prompts = trace(*([turn((*range(4), *range(100 * at, 100 * at + 6)))] for at in range(1, 6)))
    played = played_of(prompts, "1P_2D", sessions=10, later_turns=0).played
    assert {one.record.route for one in played} == {"SPLIT"}
    assert [turns[0].head for turns in prompts.conversations] == [1] * 5


@pytest.mark.parametrize(("pauses", "wait_s"), [({"think_s": 5.0}, 5.0), ({"gap_s": 30.0}, 30.0)])
def test_pauses_are_from_the_answer_or_from_the_request_before(pauses: dict[str, float], wait_s: float) -> None:
    prompts = trace([turn(HISTORY), replace(turn(range(12)), **pauses)])  # type: ignore[arg-type]
    first, second = (one.record for one in played_of(prompts, sessions=1, later_turns=1).played[:2])
    assert first.last_token_s is not None
    since_s = first.last_token_s if "think_s" in pauses else first.scheduled_s
    assert second.scheduled_s == pytest.approx(since_s + wait_s)


def test_long_pauses_and_long_contexts_can_be_cut() -> None:
    turns = [turn(HISTORY), turn(range(12), think_s=500.0), turn(range(40))]
    prompts = trace(turns, most_tokens=1000, most_pause_s=60.0)
    assert [(one.prompt_tokens, one.think_s) for one in prompts.conversations[0]] == [(640, 0.0), (768, 60.0)]
    with pytest.raises(ConfigError, match="at most 100 tokens"):
        trace(turns, most_tokens=100)


@pytest.mark.parametrize(
    "name", ["mooncake.jsonl", "bailian.jsonl", "weka.jsonl", "weka_native.json", "tracelab.jsonl", "sharegpt.json"]
)
def test_every_format_can_be_played(name: str) -> None:
    conversations = read(SAMPLES / name)
    prompts = traced_prompts(conversations, most_pause_s=5.0)
    for traced, turns in zip(conversations, prompts.conversations, strict=True):
        recorded = [one.prompt.tokens for one in traced.turns if one.prompt is not None]
        assert not recorded or [one.prompt_tokens for one in turns] == recorded
        for one in turns:
            assert sum(span.tokens for span in one.spans) == sum(unit.tokens for unit in one.units) == one.prompt_tokens
            assert sum(span.tokens for span in one.reply) == one.output_tokens
    sessions = len(conversations)
    played = played_of(prompts, "1P_1D", sessions=sessions, later_turns=prompts.later_turns)
    assert played.is_whole
    assert not any(one.record.error for one in played.played)


def test_texts_without_lengths_count_four_characters_a_token() -> None:
    said = TracedTurn(messages=(Message("user", "x" * 400),), reply="y" * 80)
    (made,) = trace([said]).conversations[0]
    assert (made.prompt_tokens, made.output_tokens) == (100, 20)


# -- starts


TIMED = traced_prompts(
    [TracedConversation(str(at), at_s, (turn((at,)), turn((at, 9)))) for at, at_s in enumerate((5.0, 6.0, 8.0))]
)


def test_a_trace_starts_by_its_own_times_again_and_again() -> None:
    starts = list(islice(Playback(rate=None).starts(TIMED), 5))
    assert starts == [(0.0, 0, 0), (1.0, 1, 0), (3.0, 2, 0), (4.5, 0, 1), (5.5, 1, 1)]


def test_a_poisson_process_has_its_rate_and_stretches_with_it() -> None:
    slow, fast = (list(islice(Playback(rate=rate, seed=7).starts(TIMED), 3000)) for rate in (1.0, 4.0))
    assert slow[-1][0] == pytest.approx(3000, rel=0.1)
    assert [at_s / 4 for at_s, *_ in slow] == pytest.approx([at_s for at_s, *_ in fast])
    assert [which for _, which, _ in slow] == [which for _, which, _ in fast]


def test_a_trace_with_times_keeps_its_order_and_one_without_is_drawn() -> None:
    kept = [which for _, which, _ in islice(Playback(rate=1.0, seed=1).starts(TIMED), 6)]
    assert kept[:3] in ([0, 1, 2], [1, 2, 0], [2, 0, 1])
    assert kept[3:] == kept[:3]
    drawn = trace(*([turn((at,))] for at in range(50)))
    orders = [[which for _, which, _ in islice(Playback(rate=1.0, seed=seed).starts(drawn), 50)] for seed in (1, 2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(50))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Playback(rate=0.0), "rate"),
        (lambda: Playback(rate=float("nan")), "rate"),
        (lambda: Playback(rate=1.0, sessions=0), "sessions"),
        (lambda: Playback(rate=1.0, warm_up_s=-1.0), "warm_up_s"),
        (lambda: played_of(trace([turn((1,))]), rate=None, later_turns=0), "a rate must be given"),
        (lambda: played_of(trace([turn((1,))])), "later_turns must be 0"),
    ],
)
def test_what_cannot_be_played_is_one_clear_error(call: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("setting", ["published_routing", "retokenised_replies"])
def test_settings_of_a_plan_are_refused_for_a_trace(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        play(TIMED, Playback(rate=1.0), "1P_1D", replace(SETUP, **{setting: True}))  # type: ignore[arg-type]


# -- windows


def test_a_window_has_its_sessions_and_later_turns_at_any_rate() -> None:
    prompts = trace([turn(HISTORY), turn(range(12), think_s=2.0)])
    for rate in (0.2, 20.0):
        window = played_of(prompts, "2R", rate=rate, sessions=30, later_turns=40, warm_up_s=10.0)
        assert window.is_whole
        turns = [one.record.turn for one in window.played]
        assert turns.count(1) >= 30
        assert len(turns) - turns.count(1) >= 40
        assert min(one.record.scheduled_s for one in window.played) >= 10.0


def test_the_warm_up_lasts_until_later_turns_come_at_their_rate() -> None:
    prompts = trace([turn((1,), 100), *(turn(range(1, at), 100, think_s=99.0) for at in range(3, 12))])
    assert 800 <= Playback(rate=1.0).warm_up(prompts) <= 900


def test_turns_that_do_not_end_are_recorded_as_such() -> None:
    prompts = trace([turn(HISTORY, 4000), turn(range(12), think_s=1.0)])
    window = played_of(prompts, rate=1.0, sessions=5, later_turns=0, grace_s=1.0)
    errors = [one.record.error for one in window.played]
    assert len(errors) >= 5
    assert set(errors) == {UNFINISHED}


def test_the_same_playback_gives_the_same_turns() -> None:
    prompts = traced_prompts(read(SAMPLES / "mooncake.jsonl"))
    again = [played_of(prompts, "1P_2D", rate=3.0, sessions=20, later_turns=10, seed=5).played for _ in range(2)]
    assert again[0] == again[1]
    assert again[0] != played_of(prompts, "1P_2D", rate=3.0, sessions=20, later_turns=10, seed=6).played
