from __future__ import annotations

import pytest

from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import Role
from ppd.servers.fleet.topology import Topology


@pytest.mark.parametrize(
    ("name", "counts", "own"),
    [
        ("4R", (0, 0, 4), ()),
        ("1P_3D", (1, 3, 0), (None, None, None)),
        ("3P_1pD", (3, 1, 0), (1.0,)),
        ("1P_1D_2pD", (1, 3, 0), (0.0, 1.0, 1.0)),
        ("1R_1P_1D_1pD", (1, 2, 1), (0.0, 1.0)),
        ("1pD_1R_1D_1P", (1, 2, 1), (0.0, 1.0)),
    ],
)
def test_a_name_says_how_many_workers_and_which_d_keep_their_turns(
    name: str, counts: tuple[int, int, int], own: tuple[float | None, ...]
) -> None:
    topology = Topology.parse(name)
    assert (topology.prefills, topology.decodes, topology.replicas) == counts
    assert topology.x_of_decodes == own
    assert topology.has_choice == (None in own)
    assert topology.workers == sum(topology.by_role.values()) == sum(counts)


def test_encoders_stand_beside_those_who_answer() -> None:
    topology = Topology.parse("1E_1P_2D")
    assert (topology.by_role[Role.ENCODE], topology.workers) == (1, 4)
    assert not topology.is_same(Topology.parse("1P_2D")) and topology.is_same(Topology.parse("1P_2D_1E"))


@pytest.mark.parametrize(
    "name", ["", "1P", "P_D", "2D_1X", "1P_2R", "0R", "1P_1pP", "1P_1dD", "1P_3pD_", "2E", "1E_1P"]
)
def test_a_topology_that_cannot_answer_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="topology = "):
        Topology.parse(name)
