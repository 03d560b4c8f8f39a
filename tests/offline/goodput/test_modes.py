"""The modes of a simulated proxy."""

from __future__ import annotations

import pytest

from ppd.offline.goodput.modes import NAMES, OF_PAIRS, OF_REPLICAS, ORACLE, modes_on, proxy_setup
from ppd.proxy.config import Mode, build
from ppd.proxy.errors import ConfigError
from ppd.proxy.laws.targets import SloTargets
from ppd.proxy.policy.modes import PLACING
from ppd.servers.fleet.topology import Topology

PAIRS = Topology.parse("1P_1D")


def test_the_oracle_is_slo_that_knows_each_answers_length() -> None:
    targets = SloTargets(ttft_s=0.5)
    oracle, slo = (proxy_setup(name, PAIRS, targets=targets) for name in (ORACLE, "slo"))
    assert (oracle.rules, oracle.slo) == (slo.rules, slo.slo)
    assert (oracle.oracle, slo.oracle) == (True, False)
    assert ORACLE in modes_on(PAIRS)
    assert {*NAMES} == {*Mode, ORACLE} - {Mode.PROFILES}


def test_rules_for_pairs_are_those_that_choose_no_workers() -> None:
    assert {*Mode} - PLACING - OF_REPLICAS == OF_PAIRS
    assert {*modes_on(Topology.parse("4R"))} == {*NAMES} - OF_PAIRS


def test_a_live_proxy_refuses_to_be_an_oracle() -> None:
    with pytest.raises(ConfigError, match="mode = 'oracle': must be"):
        build(None, {"mode": ORACLE})
