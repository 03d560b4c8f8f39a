"""Whole runs in virtual time: the proxy's own routing, transfers, leases, and clients with few connections."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct

from ppd.offline.experiment.records import Record
from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.simulation.setup import Setup
from ppd.offline.simulation.simulate import simulate
from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import Role
from ppd.proxy.laws.profile_file import SlowWorker, Transfers
from ppd.proxy.laws.step_time import EngineProfile
from tests.support.stepped_engine import profile_of

pytestmark = pytest.mark.slow

PROFILE = profile_of()
SETUP = Setup(profile=PROFILE)
BUSY = Workload(
    first=Profile(name="first", new_tokens=512, output_tokens=64),
    later=Profile(name="later", new_tokens=64, output_tokens=32),
    turns=4,
)


def run_of(topology: str = "1P_2D", x: float | None = 0.5, **settings: object) -> Run:
    return Run(**{"topology": topology, "workload": BUSY, "qps": 4.0, "x": x, **settings})  # type: ignore[arg-type]


def of_turn(records: tuple[Record, ...], turn: int) -> list[Record]:
    return [record for record in records if record.turn == turn]


def costing(**costs: float) -> Setup:
    return replace(SETUP, profile=replace_struct(PROFILE, costs=EngineProfile(**costs)))  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_records_and_another_does_not() -> None:
    assert simulate(run_of(seed=1), SETUP) == simulate(run_of(seed=1), SETUP)
    assert simulate(run_of(seed=1), SETUP) != simulate(run_of(seed=2), SETUP)


def test_both_arms_get_the_same_conversations() -> None:
    split, local = simulate(run_of(x=0.0), SETUP), simulate(run_of(x=1.0), SETUP)
    assert [one.scheduled_s for one in of_turn(split, 1)] == [one.scheduled_s for one in of_turn(local, 1)]


@pytest.mark.parametrize(("x", "routes"), [(0.0, {"SPLIT"}), (1.0, {"LOCAL"}), (0.5, {"SPLIT", "LOCAL"})])
def test_later_turns_go_the_way_that_the_run_asks_for(x: float, routes: set[str]) -> None:
    records = simulate(run_of(x=x), SETUP)
    assert {record.route for record in of_turn(records, 1)} == {"SPLIT"}
    assert {record.route for record in records if record.turn > 1} == routes


@pytest.mark.slow
def test_a_mixed_fleet_shares_conversations_among_its_replicas_and_its_decode_workers() -> None:
    records = simulate(run_of("1R_1P_2D", x=1.0, conversations=300), SETUP)
    on_replicas = Counter(record.decode[0] for record in of_turn(records, 1))["R"]
    assert on_replicas / len(of_turn(records, 1)) == pytest.approx(1 / 3, abs=0.1)
    assert len({(record.conversation, record.decode) for record in records}) == len(of_turn(records, 1))


def test_a_session_stays_on_its_decode_worker_and_finds_its_history_there() -> None:
    records = simulate(run_of(x=1.0), SETUP)
    assert len({(record.conversation, record.decode) for record in records}) == len(of_turn(records, 1))
    assert {record.decode for record in records} == {"D1", "D2"}
    for record in of_turn(records, 2):
        assert record.cached_tokens == (512 + 63) // 16 * 16


def test_what_was_evicted_meanwhile_is_not_appended_to() -> None:
    """The proxy's residency record says so before the engine does; the turn becomes a SPLIT."""
    small = replace(SETUP, profile=replace_struct(PROFILE, kv_capacity_tokens=4000))
    patient = Workload(first=BUSY.first, later=BUSY.later, turns=2, think_s=60.0)
    records = simulate(run_of(x=1.0, workload=patient, seconds=60.0), small)
    routes = Counter(record.route for record in of_turn(records, 2))
    assert routes["SPLIT"] > routes["LOCAL"] > 0


def test_only_missing_blocks_are_pulled_and_whole_prompts_are_pushed() -> None:
    slow = {"transfer_bytes_per_s": 1e9, "transfer_s": 0.0}  # 0.13 ms a token
    pulled = simulate(run_of("1P_1D", x=0.0, qps=0.5), costing(**slow))
    whole = replace_struct(costing(**slow).profile, transfers=Transfers.WHOLE)
    pushed = simulate(run_of("1P_1D", x=0.0, qps=0.5), Setup(profile=whole))
    saved_s = [there.ttft_s - here.ttft_s for here, there in zip(pulled, pushed, strict=True) if here.turn == 4]  # type: ignore[operator]
    missing, prompt = 64 + 16, 512 + 3 * 96
    assert min(saved_s) > 0.5 * (prompt - missing) * 131_072 / 1e9


def test_transfers_of_one_prefill_worker_wait_for_each_other() -> None:
    setup = costing(send_s=0.2)
    one, three = (simulate(run_of(topology, x=0.0, qps=3.0), setup) for topology in ("1P_3D", "3P_3D"))
    slowest = [max(record.ttft_s for record in of_turn(records, 1) if record.ttft_s) for records in (one, three)]
    assert slowest[0] > 2 * slowest[1]


def test_a_handoff_whose_lease_is_over_is_computed_on_the_decode_worker() -> None:
    records = simulate(run_of("1P_1D", x=0.0), replace(SETUP, lease_s=1e-3))
    normal = simulate(run_of("1P_1D", x=0.0), SETUP)
    assert not any(record.error for record in records)
    late, usual = (sum(one.tpot_s for one in rows if one.tpot_s) for rows in (records, normal))
    assert late > usual  # D's streams wait for prefills now


def test_a_client_with_few_connections_waits_with_its_clock_running() -> None:
    open_loop, capped = simulate(run_of(), SETUP), simulate(run_of(), replace(SETUP, connections=2))
    assert all(record.sent_s == record.scheduled_s for record in open_loop)
    assert max(record.sent_s - record.scheduled_s for record in of_turn(capped, 1)) > 1.0
    assert all(record.sent_s == record.scheduled_s for record in of_turn(capped, 2))  # its own connection again


def test_a_prompt_that_no_engine_can_hold_fails_and_so_do_the_turns_after_it() -> None:
    tiny = replace(SETUP, profile=replace_struct(PROFILE, kv_capacity_tokens=600))
    records = simulate(run_of(qps=0.5), tiny)
    assert {(record.turn, record.status) for record in records} == {(1, 200), (2, 400), (3, 0), (4, 0)}
    assert all(bool(record.error) == (record.turn > 1) for record in records)
    assert all(record.ttft_s is None for record in records if record.error)


def test_retokenised_answers_are_prefilled_again() -> None:
    records = simulate(run_of(x=1.0, qps=0.5), replace(SETUP, retokenised_replies=1.0))
    assert {record.cached_tokens for record in of_turn(records, 2)} == {512}


def test_where_each_d_has_its_own_x_the_proxy_goes_by_it() -> None:
    records = simulate(run_of("1P_1D_1pD", x=None), SETUP)
    ways = Counter((record.decode, record.route) for record in records if record.turn > 1)
    assert set(ways) == {("D1", "SPLIT"), ("D2", "LOCAL")}
    assert {record.route for record in of_turn(records, 1)} == {"SPLIT"}


def test_one_worker_of_the_measured_fleet_may_be_slow() -> None:
    slow = SlowWorker(
        topology="2R", worker="R2", request_s=0, prefill_token_s=0, context_token_s=1e-5, mean_context_token_s=0
    )
    records = simulate(run_of("2R", x=None), replace(SETUP, slow=slow))
    usual = {record.decode: record.tpot_s for record in simulate(run_of("2R", x=None), SETUP)}
    tpots = {name: [one.tpot_s or 0.0 for one in records if one.decode == name] for name in usual}
    assert min(tpots["R2"]) > max(tpots["R1"])
    elsewhere = replace(SETUP, slow=replace_struct(slow, topology="3R"))
    assert simulate(run_of("2R", x=None), elsewhere) == simulate(run_of("2R", x=None), SETUP)


def test_requests_of_a_shared_prefix_find_it() -> None:
    workload = Workload(first=BUSY.first, later=BUSY.later, shared_prefix_tokens=256)
    records = simulate(run_of("1R", x=None, workload=workload), SETUP)
    assert {record.cached_tokens for record in of_turn(records, 1)} == {0, 256}


def test_a_run_without_end_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppd.offline.simulation.simulate.HORIZON_S", 3600.0)
    patient = Workload(first=BUSY.first, later=BUSY.later, think_s=1e9)
    with pytest.raises(ConfigError, match=r"first_later-think1e\+09/q4-s0: \d+ conversations have no end"):
        simulate(run_of(workload=patient), SETUP)


@pytest.mark.parametrize(
    "setting",
    [{"connections": 0}, {"unrecognised": 1.5}, {"retokenised_replies": -0.1}, {"lease_s": 0.0}, {"heartbeat_s": -1.0}],
)
def test_a_setting_out_of_range_is_named(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        Setup(profile=PROFILE, **setting)  # type: ignore[arg-type]


def test_a_role_may_have_costs_and_a_chunk_budget_of_its_own() -> None:
    slow = replace(SETUP, costs_of={Role.DECODE: EngineProfile(prefill_token_s=1e-3)})
    small = replace(SETUP, costs_of={Role.PREFILL: EngineProfile(max_batched_tokens=64)})

    def ttft_s(setup: Setup, turn: int) -> float:
        found = of_turn(simulate(run_of("1P_1D", x=1.0, qps=0.2), setup), turn)
        return sum(one.ttft_s for one in found if one.ttft_s) / len(found)

    appended, chunks = 64 + 16, 512 // 64
    assert ttft_s(slow, 2) == pytest.approx(ttft_s(SETUP, 2) + appended * 1e-3, rel=0.2)
    assert ttft_s(slow, 1) == pytest.approx(ttft_s(SETUP, 1), rel=0.05)
    assert ttft_s(small, 1) == pytest.approx(ttft_s(SETUP, 1) + (chunks - 1) * EngineProfile().step_s, rel=0.05)
