"""The engines of a soak, by their connector: who there is, and how each is started and announced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ppd.proxy.connectors import CONNECTORS
from ppd.proxy.connectors.mooncake import Mooncake
from ppd.proxy.connectors.nixl import Nixl
from ppd.proxy.connectors.nixl_push import NixlPush
from ppd.proxy.connectors.p2p_nccl import P2pNccl
from ppd.proxy.connectors.sglang import SGLang
from ppd.proxy.fleet.worker import Role
from ppd.servers.sim.protocols import PROTOCOLS
from ppd.servers.sim.protocols.legs import Own

HOST: Final = "127.0.0.1"
SPARE: Final = "D4"  # joins and leaves
_ONE_ROLE = (Mooncake.name, P2pNccl.name, SGLang.name)  # connectors whose engines are P or D from their start


@dataclass(frozen=True, slots=True)
class SoakEngines:
    """Names begin with the role."""

    connector: str = Nixl.name

    @property
    def names(self) -> tuple[str, ...]:
        """Without `SPARE`. Where no D answers alone, as many R that whatever cannot be split has one that is well."""
        if CONNECTORS[self.connector].decodes_alone or self._takes_plain("D1"):
            return "P1", "P2", "D1", "D2", "D3", "R1"
        return "P1", "P2", "D1", "D2", "R1", "R2", "R3"

    @property
    def may_change_role(self) -> bool:
        return self.connector not in _ONE_ROLE

    @property
    def most_poisoned(self) -> int:
        """Engines that one prompt may end: two, or P and D at once and one more."""
        return 3 if CONNECTORS[self.connector].order.is_joint else 2

    def flags(self, name: str) -> list[str]:
        """Of `ppd sim`."""
        if not self._has_connector(name):
            return []
        flags = ["--connector", self.connector]
        if self.connector == NixlPush.name:  # whose operator pins it, so that a new process has it too
            flags += ["--engine-id", name]
        return [*flags, "--takes-plain"] if self._takes_plain(name) else flags

    def told(self, name: str, side_port: int) -> str:
        """What the proxy is told of it besides role and address."""
        if not self._has_connector(name):
            return ""
        own = Own(Role(name[0]), name, HOST, side_port, takes_plain=self._takes_plain(name))
        told = {"connector": self.connector, **PROTOCOLS[self.connector].coordinates(own)}
        return "".join(f",{key}={value}" for key, value in told.items())

    def _has_connector(self, name: str) -> bool:
        """Otherwise it has the usual one. An R of vLLM takes part in no KV transfer."""
        return name[0] != Role.REPLICA or PROTOCOLS[self.connector].engine != "vllm"

    def _takes_plain(self, name: str) -> bool:
        return self.connector == P2pNccl.name and name[0] == Role.DECODE
