"""What a simulation needs beside the run: the engines' profile, the proxy's heartbeats, and the client's habits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from msgspec.structs import replace as replace_struct

from ppd.proxy.errors import ConfigError
from ppd.proxy.fleet.worker import Role
from ppd.proxy.laws.profile_file import ProfileFile, SlowWorker, Transfers
from ppd.proxy.laws.step_time import EngineProfile
from ppd.servers.fleet.topology import Topology

from ..experiment.records import Origin
from ..experiment.run import Run
from .modelled_hardware import profile_for
from .workers.encoder import ENCODER_ITEM_S

MOST_WORKERS = 1024  # of a fleet that is simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One way of simulating, the same for every run of a sweep."""

    profile: ProfileFile
    lease_s: float = 30.0  # how long P keeps a finished prefill for D
    heartbeat_s: float = 10.0  # how often the proxy hears an engine's load
    heartbeat_delay_s: float = 0.005
    connections: int | None = None  # of the client at most; TTFT includes waiting for one
    retokenised_replies: float = 0.0  # share of the answers that, sent back as text, are other tokens: not cached
    unrecognised: float = 0.0  # share of later turns that published routing treats as first turns
    published_routing: bool = False  # of the paper's prototype: workers by a hash of the conversation
    slow: SlowWorker | None = None  # in the measured fleet that is simulated
    encoder_item_s: float = ENCODER_ITEM_S  # of encoding an image
    encoder_slowness: float = 1.0  # of an E, in that
    costs_of: Mapping[Role, EngineProfile] = field(default_factory=dict, hash=False)  # where a role's differ

    def __post_init__(self) -> None:
        if self.connections is not None and self.connections < 1:
            raise ConfigError(f"connections = {self.connections}: must be at least 1", param="connections")
        for name in ("unrecognised", "retokenised_replies"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be a share from 0 to 1", param=name)
        if self.encoder_item_s < 0:
            raise ConfigError(f"encoder_item_s = {self.encoder_item_s}: must not be negative", param="encoder_item_s")
        for name in ("lease_s", "heartbeat_s", "encoder_slowness"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be above 0", param=name)

    def costs(self, role: Role, topology: str = "", worker: str = "") -> EngineProfile:
        """Of steps, with the budget of their tokens, of requests, and of what the worker sends."""
        costs, slow = self.costs_of.get(role) or self.profile.costs, self.slow
        return slow.costs(costs) if slow is not None and (slow.topology, slow.worker) == (topology, worker) else costs

    def origin(self, run: Run) -> Origin:
        profile = self.profile
        return Origin(
            backend="simulate",
            engine="ppd simulator",
            model=profile.model,
            gpu=profile.gpu,
            gpu_count=profile.gpu_count * Topology.parse(run.topology).workers,
            connector="whole prompts pushed" if profile.transfers is Transfers.WHOLE else "missing blocks pulled",
            profile=profile.name,
            note="; ".join(
                filter(
                    None,
                    (
                        f"simulated in virtual time; the engine profile is {profile.status}",
                        profile.beyond(run.workload.longest_context),
                    ),
                )
            ),
        )


def pulled(profile: ProfileFile) -> ProfileFile:
    """As with NIXL: D reads the blocks that it lacks, in the time that a handoff was measured to take; P goes on."""
    costs = replace(profile.costs, transfer_s=profile.costs.transfer_s + profile.costs.send_s, send_s=0.0)
    return replace_struct(profile, transfers=Transfers.MISSING, costs=costs)


def setup_for(hardware: str) -> Setup:
    return Setup(profile=profile_for(hardware))
