"""Which laws each worker has."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace as replace_view

from ppd.proxy.errors import ConfigError, ConfigErrors
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Source
from ppd.proxy.laws.accuracy import TURNS, Basis
from ppd.proxy.laws.corrections import USUAL_SPREAD, WORKERS_KEPT, Figure, Measured
from ppd.proxy.laws.profile_file import FittedRange, encode, find, with_cap
from ppd.proxy.laws.profiles import REFUSED_KEPT, Profiles
from ppd.proxy.laws.worker_laws import AGED_S, LawsLessons, LawsReset, TableTime, TurnTimes, WorkerLaws, likes_of
from tests.support.decisions import D1, D2, P1

SHIPPED = "h100-llama-3.1-8b"


def of_profile(view: WorkerView, profile: str, source: Source = Source.AGENT) -> WorkerView:
    return replace_view(view, worker=replace(view.worker, profile=profile, source=source))


def profile_name(laws: WorkerLaws, view: WorkerView) -> str | None:
    found = laws.of(view)
    return None if found is None else found.profile


@pytest.fixture
def own(tmp_path: Path) -> str:
    """The path of a profile that is not bundled."""
    path = tmp_path / "slow.json"
    path.write_bytes(encode(msgspec.structs.replace(find(SHIPPED), name="slow")))
    return str(path)


def test_without_a_profile_nothing_is_known() -> None:
    assert WorkerLaws().of(D1) is None


def test_a_worker_has_its_own_profile_or_the_configs(own: str) -> None:
    laws = WorkerLaws(Profiles(SHIPPED, [own]))
    views = (D1, of_profile(D2, own, Source.STATIC), of_profile(P1, "slow"))
    assert [profile_name(laws, view) for view in views] == [SHIPPED, "slow", "slow"]


def test_the_config_says_how_engines_were_started_unless_a_profile_does(tmp_path: Path) -> None:
    path, shipped = tmp_path / "capped.json", find(SHIPPED)
    path.write_bytes(encode(with_cap(shipped, 512)))
    profiles = Profiles(SHIPPED, [str(path)], long_prefill_tokens=2048)
    usual, own = profiles.of(D1.worker), profiles.of(of_profile(D2, str(path), Source.STATIC).worker)
    assert usual is not None and own is not None
    assert (usual.costs.long_prefill_tokens, own.costs.long_prefill_tokens) == (2048, 512)
    assert not profiles.is_in(Profiles(SHIPPED, [str(path)]))


def test_an_agent_may_name_a_bundled_profile() -> None:
    assert profile_name(WorkerLaws(), of_profile(D1, SHIPPED)) == SHIPPED


@pytest.mark.parametrize("name", ["unknown", "../h100-llama-3.1-8b", "/etc/passwd", "h100-llama-3.1-8b.json"])
def test_a_profile_that_an_agent_names_in_vain_is_told_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    laws = WorkerLaws(Profiles(SHIPPED))
    assert [profile_name(laws, of_profile(view, name)) for view in (D1, D2, D1)] == [SHIPPED] * 3
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert repr(name) in caplog.text


def test_an_agent_names_no_file(own: str) -> None:
    assert profile_name(WorkerLaws(), of_profile(D1, own)) is None


def test_a_flood_of_names_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    profiles = Profiles()
    for number in range(2 * REFUSED_KEPT):
        assert profiles.of(of_profile(D1, f"n{number}").worker) is None
    assert len(caplog.records) == REFUSED_KEPT


def test_a_worker_that_announces_another_profile_gets_it() -> None:
    laws = WorkerLaws()
    assert laws.of(D1) is None
    assert profile_name(laws, of_profile(D1, SHIPPED)) == SHIPPED


def test_it_is_looked_up_once() -> None:
    laws = WorkerLaws(Profiles(SHIPPED))
    assert laws.of(D1) is laws.of(replace_view(D1, inflight=3))


def test_workers_are_bounded() -> None:
    laws = WorkerLaws(Profiles(SHIPPED))
    for number in range(WORKERS_KEPT + 10):
        laws.of(replace_view(D1, worker=replace(D1.worker, address=f"h{number}:1")))
    assert len(laws._known) <= WORKERS_KEPT


def test_profiles_that_cannot_be_read_are_all_told_with_their_keys(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{")
    with pytest.raises(ConfigErrors) as caught:
        Profiles("none-such", [str(damaged)])
    told = [(error.param, error.message) for error in caught.value.errors]
    assert [param for param, _ in told] == ["profile", "workers"]
    assert ["none-such" in told[0][1], "damaged.json" in told[1][1]] == [True, True]


@pytest.mark.parametrize("key", ["profile", "workers"])
def test_a_damaged_profile_names_its_key(tmp_path: Path, key: str) -> None:
    damaged = tmp_path / "damaged.json"
    damaged.write_bytes(encode(find(SHIPPED)).replace(b"step_s", b"stop_s", 1))
    with pytest.raises(ConfigError, match=rf"^{key}: .*damaged\.json.*step_s") as caught:
        Profiles(*((str(damaged),) if key == "profile" else ("", [str(damaged)])))
    assert caught.value.param == key


def test_a_config_read_again_without_another_profile_changes_nothing(own: str) -> None:
    laws = WorkerLaws(Profiles(SHIPPED, [own]))
    before, version = laws.of(D1), laws.version
    laws.use(Profiles(SHIPPED, [own]))
    assert (laws.of(D1) is before, laws.version) == (True, version)
    laws.use(Profiles(own))
    assert (profile_name(laws, D1), laws.version == version) == ("slow", False)


def test_a_turn_beyond_the_profiles_reach_is_a_guess() -> None:
    laws = WorkerLaws(Profiles(SHIPPED)).of(D1)
    assert laws is not None
    most = find(SHIPPED).reach
    assert most is not None
    assert laws.reach == most
    turns = [(0, 0), (1, 0), (0, 1)]
    guesses = [laws.is_guess(most.context_tokens + context, most.new_tokens + new) for context, new in turns]
    assert guesses == [False, True, True]
    assert not msgspec.structs.replace(laws, reach=None).is_guess(10**9, 10**9)
    assert not msgspec.structs.replace(laws, reach=FittedRange(context_tokens=9, new_tokens=9, qps=1)).is_guess(9, 9)


# -- what turns teach


def turn(ratio: float, view: WorkerView = D1, *, resets: int = 0, is_guess: bool = False) -> TurnTimes:
    """Both of its times were so many times what the profile says."""
    likes = likes_of(SHIPPED, view.worker)
    measured = [Measured(view.id, view.incarnation, likes, figure, 0.1, 1.0, 0.1 * ratio) for figure in Figure]
    return TurnTimes(resets, measured, is_guess=is_guess)


def taught(ratio: float = 2.0, turns: int = 60) -> WorkerLaws:
    laws = WorkerLaws(Profiles(SHIPPED))
    for number in range(turns):
        laws.learn(turn(ratio), float(number))
    return laws


def factors(laws: WorkerLaws, view: WorkerView = D1) -> tuple[float, float]:
    found = laws.of(view)
    assert found is not None
    return found.ttft_factor, found.tpot_factor


def test_what_turns_measure_corrects_the_laws_of_their_worker_and_of_its_likes() -> None:
    laws = WorkerLaws(Profiles(SHIPPED))
    before, version = factors(laws), laws.version
    for number in range(60):
        assert factors(laws, D2) == factors(laws, D2)
        laws.learn(turn(2.0), float(number))
    assert before == (1.0, 1.0)
    assert factors(laws) == pytest.approx((2.0, 2.0), rel=0.1)
    assert factors(laws, D2) == pytest.approx((2.0, 2.0), rel=0.2)
    assert factors(laws, P1) == (1.0, 1.0)
    assert laws.version != version


def test_turns_that_are_as_predicted_narrow_the_spread_of_ttfts() -> None:
    before, after = WorkerLaws(Profiles(SHIPPED)).of(D1), taught(1.0).of(D1)
    assert before is not None
    assert after is not None
    assert after.ttft_spread < before.ttft_spread == pytest.approx(USUAL_SPREAD)


def test_a_guess_teaches_nothing_but_is_counted() -> None:
    laws = WorkerLaws(Profiles(SHIPPED))
    for number in range(60):
        laws.learn(turn(3.0, is_guess=True), float(number))
    assert (factors(laws), list(laws.judged()), laws.guesses) == ((1.0, 1.0), [], {SHIPPED: 60})


def test_a_reset_forgets_all_and_what_was_decided_before_it_teaches_nothing() -> None:
    laws = taught()
    laws.reset()
    assert (factors(laws), list(laws.judged()), laws.resets) == ((1.0, 1.0), [], 1)
    laws.learn(turn(3.0), 61.0)
    assert factors(laws) == (1.0, 1.0)
    laws.learn(turn(3.0, resets=1), 62.0)
    assert factors(laws) > (1.0, 1.0)


def test_a_reset_that_was_not_heard_of_is_made_up_for() -> None:
    laws = taught()
    laws.take(turn(1.0, resets=2), 61.0)
    assert (laws.resets, factors(laws) < (1.1, 1.1)) == (2, True)
    laws.take(LawsReset(1), 62.0)
    assert laws.resets == 2


def test_long_silence_brings_a_worker_back_to_its_likes() -> None:
    laws = WorkerLaws(Profiles(SHIPPED))
    for number in range(200):
        laws.learn(turn(3.0), float(number))
        laws.learn(turn(1.0, D2), float(number))
        laws.learn(turn(1.0, of_address("d3:80")), float(number))
    slow = factors(laws)
    laws.advance(200.0 + AGED_S)
    assert factors(laws) == pytest.approx(slow, rel=0.05)
    laws.advance(86_400.0)
    assert factors(laws) == pytest.approx(factors(laws, of_address("new:80")), rel=0.05)
    assert factors(laws)[0] < slow[0] / 2


def of_address(address: str) -> WorkerView:
    return replace_view(D1, worker=replace(D1.worker, address=address))


def test_operators_see_factors_counts_and_errors() -> None:
    laws = taught(turns=TURNS)
    shown = laws.shown(D1)[Figure.TTFT]
    assert [shown.factor, shown.turns] == pytest.approx([2.0, 100.0], rel=0.1)
    assert shown.median_error == pytest.approx(0.5)  # of the profile alone, as these turns' decisions went by it
    assert [(one.name, one.figure, one.stale) for one in laws.judged()] == [(SHIPPED, one, True) for one in Figure]
    assert laws.shown(of_address("new:80"))[Figure.TPOT].median_error is None
    assert WorkerLaws().shown(D1) == {}


def test_a_table_whose_cells_say_otherwise_is_stale_too() -> None:
    laws = WorkerLaws()
    for number in range(TURNS):
        spread = 0.7 + 0.6 * (number % 2)  # single turns are not the cell's mean
        laws.learn(TurnTimes(0, by_table=[TableTime("t", Figure.TTFT, 0.1, 0.1 * spread)]), float(number))
        laws.learn(TurnTimes(0, by_table=[TableTime("t", Figure.TPOT, 0.1, 0.2 * spread)]), float(number))
        laws.learn(TurnTimes(0, by_table=[TableTime("t", Figure.TPOT, 0.0, 0.2)]), float(number))
    assert {(one.basis, one.figure): one.stale for one in laws.judged()} == {
        (Basis.TABLE, Figure.TTFT): False,
        (Basis.TABLE, Figure.TPOT): True,
    }


def test_another_process_takes_all_of_it() -> None:
    ours, theirs = taught(turns=TURNS), WorkerLaws(Profiles(SHIPPED))
    theirs.adopt(msgspec.msgpack.decode(msgspec.msgpack.encode(ours.lessons()), type=LawsLessons), TURNS - 1.0)
    assert theirs.version == ours.version
    assert (factors(theirs), factors(theirs, D2)) == (factors(ours), factors(ours, D2))
    assert (list(theirs.judged()), theirs.shown(D1)) == (list(ours.judged()), ours.shown(D1))
    theirs.reset()
    theirs.adopt(ours.lessons(), float(TURNS))
    assert factors(theirs) == (1.0, 1.0)
