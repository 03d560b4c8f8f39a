"""A READBACK that is forced: where it can be had, and by which veto it is a SPLIT."""

from __future__ import annotations

from dataclasses import replace as replace_worker

import pytest
from msgspec.structs import replace

from ppd.proxy.config import Mode
from ppd.proxy.fleet.order import LoadOrder, Ranked
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.policy import Route, Turn, decide
from ppd.proxy.policy.decision import Readable
from tests.support.decisions import D1, D2, NEXT, P1, P2, R1, fleet_of, held, rules, run, view


def told(view: WorkerView) -> WorkerView:
    return replace(view, worker=replace_worker(view.worker, coordinates={"bidirectional_kv_xfer": "true"}))


P2_TOLD, D2_TOLD = told(P2), told(D2)
KEPT = replace(NEXT, readable=Readable(D2.id, 990), forced=Route.READBACK)
FLEET = (P1, P2_TOLD, D1, D2_TOLD, R1)


@pytest.mark.parametrize("mode", [Mode.TABLE, Mode.ALWAYS_LOCAL, Mode.REPLICA, Mode.SLO])
def test_p_reads_back_from_the_sessions_d_and_hands_over_to_it(mode: Mode) -> None:
    decision = run(KEPT, FLEET, rules(mode))
    assert (decision.route, decision.reason, decision.wanted) == (Route.READBACK, "forced", Route.READBACK)
    assert (decision.prefill, decision.decode, decision.source) == (P2_TOLD, D2_TOLD, D2_TOLD)
    assert decision.fetched_tokens == 990
    estimates = decision.estimates(KEPT)
    assert (estimates.new_on_prefill_tokens, estimates.fetched_tokens) == (1040, 990), "it uses nothing that P2 holds"


@pytest.mark.parametrize(
    ("turn", "fleet", "veto"),
    [
        (replace(KEPT, readable=None), FLEET, "no_handle"),
        (replace(KEPT, readable=None, unreadable="not_a_prefix"), FLEET, "not_a_prefix"),
        (replace(KEPT, readable=Readable(D2.id, 1040)), FLEET, "no_handle"),  # nothing would be new
        (KEPT, (P1, D1, D2_TOLD), "no_reader"),
        (KEPT, (P2_TOLD, D1, D2), "no_reader"),
        (KEPT, (P2_TOLD, D1), "decode_gone"),
        (KEPT, (P2_TOLD, D1, replace(D2_TOLD, up=False)), "decode_down"),
        (KEPT, (P2_TOLD, D1, replace(D2_TOLD, draining=True)), "decode_draining"),
    ],
)
def test_else_it_is_a_split_with_the_veto_for_a_reason(turn: Turn, fleet: tuple[WorkerView, ...], veto: str) -> None:
    decision = run(turn, fleet, rules(Mode.ALWAYS_LOCAL))
    assert (decision.route, decision.reason, decision.vetoes) == (Route.SPLIT, veto, (veto,))
    assert decision.wanted is Route.READBACK


def test_who_failed_reads_nothing_back() -> None:
    by = rules(Mode.ALWAYS_LOCAL)
    for failed in ((P2.id,), ((P2.id, D2.id),)):
        assert run(KEPT, FLEET, by, avoid=failed).vetoes[0] == "no_reader"
    assert run(KEPT, FLEET, by, avoid=(D2.id,)).vetoes[0] == "decode_failed"


@pytest.mark.parametrize("reader", ["P9", "P8"])
def test_of_many_p_in_order_the_one_that_is_done_first_reads(reader: str) -> None:
    """P8, where P9 cannot."""
    many = [view("P", number, queued_prefill_tokens=10 - number) for number in range(1, 10)]
    prefills = Ranked(LoadOrder([told(one) if one.name <= reader else one for one in many]))
    fleet = replace(fleet_of((*prefills, D2_TOLD)), prefills=prefills)
    decision = decide(replace(KEPT, held=held(D2)), fleet, rules(Mode.ALWAYS_LOCAL), qps=2.0, now_s=100.0)
    assert decision.prefill is not None
    assert (decision.route, decision.prefill.name) == (Route.READBACK, reader)


def test_a_mode_that_does_not_predict_reads_nothing_back_unasked() -> None:
    for mode in (Mode.TABLE, Mode.ALWAYS_LOCAL, Mode.ALWAYS_SPLIT, Mode.FRACTION):
        assert run(replace(KEPT, forced=None), FLEET, rules(mode)).route is not Route.READBACK
