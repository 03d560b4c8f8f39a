"""How many workers of each role a fleet has, by a name such as `1P_3D`, `4R`, `1P_1D_2pD` or `1E_1P_2D`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import Role

_TOPOLOGY = re.compile(r"\d+(?:P|D|pD|R|E)(?:_\d+(?:P|D|pD|R|E))*")
_COUNT = re.compile(r"(\d+)(\w+)")
_ALLOWED = (
    "counts of P, D, pD, R and E such as 1P_3D, 1P_1D_2pD, 4R, 1R_1P_2D or 1E_1P_2D, with a D or an R, and P only "
    "beside D"
)


@dataclass(frozen=True, slots=True)
class Topology:
    """A pD is a D with an x of its own, 1; beside one, a D's x is 0. Without pD the x is the run's, or the proxy's."""

    name: str
    prefills: int = 0
    decodes: int = 0  # pD included
    replicas: int = 0
    local_decodes: int = 0  # the pD
    encoders: int = 0

    @classmethod
    def parse(cls, name: str) -> Topology:
        """ConfigError unless the fleet can answer: it needs a D or an R, and P only beside D."""
        counts = {"P": 0, "D": 0, "pD": 0, "R": 0, "E": 0}
        if not _TOPOLOGY.fullmatch(name):
            raise ConfigError(f"topology = {name!r}: must be {_ALLOWED}", param="topology")
        for number, kind in _COUNT.findall(name.replace("_", " ")):
            counts[kind] += int(number)
        decodes = counts["D"] + counts["pD"]
        topology = cls(name, counts["P"], decodes, counts["R"], counts["pD"], counts["E"])
        if not (topology.decodes or topology.replicas) or bool(topology.prefills) != bool(topology.decodes):
            raise ConfigError(f"topology = {name!r}: must be {_ALLOWED}", param="topology")
        return topology

    @property
    def workers(self) -> int:
        return self.prefills + self.decodes + self.replicas + self.encoders

    @property
    def by_role(self) -> dict[Role, int]:
        return {
            Role.PREFILL: self.prefills,
            Role.DECODE: self.decodes,
            Role.REPLICA: self.replicas,
            Role.ENCODE: self.encoders,
        }

    @property
    def has_choice(self) -> bool:
        """Whether a share of LOCAL turns can be asked for: there is a D, and none has an x of its own."""
        return self.decodes > 0 and not self.local_decodes

    @property
    def x_of_decodes(self) -> tuple[float | None, ...]:
        """The own x of each D, those with 0 first; None where it has none."""
        if not self.local_decodes:
            return (None,) * self.decodes
        return (0.0,) * (self.decodes - self.local_decodes) + (1.0,) * self.local_decodes

    @property
    def replica_share(self) -> float:
        """The share of conversations that go to replicas: each D and each R is one slot, as in the prototype."""
        return self.replicas / (self.replicas + self.decodes)

    def is_same(self, other: Topology) -> bool:
        """Whatever the order of the names' parts."""
        mine = (self.prefills, self.x_of_decodes, self.replicas, self.encoders)
        return mine == (other.prefills, other.x_of_decodes, other.replicas, other.encoders)
