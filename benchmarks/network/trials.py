"""What is tried, one row of the table each."""

from __future__ import annotations

from dataclasses import dataclass, field

from .fault_link import Conditions


@dataclass(frozen=True, slots=True)
class NetworkTrial:
    name: str
    conditions: Conditions = field(default_factory=Conditions)  # of the network to every worker
    partition_s: float = 0.0  # one of the two D is cut off for so long, in the middle of the trial
    resets_every_s: float = 0.0  # every connection to every worker is reset


TRIALS = (
    NetworkTrial("none"),
    NetworkTrial("5 ms", Conditions(latency_s=0.005)),
    NetworkTrial("50 to 70 ms", Conditions(latency_s=0.05, jitter_s=0.02)),
    NetworkTrial("1 % loss", Conditions(loss=0.01)),
    NetworkTrial("5 % loss", Conditions(loss=0.05)),
    NetworkTrial("one D cut off for 2 s", partition_s=2.0),
    NetworkTrial("all connections reset twice a second", resets_every_s=0.5),
)
