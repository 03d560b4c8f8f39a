"""What is measured: a workload, and one run of it on one topology with one share of LOCAL turns.

A *cell* is a combination of the sweep's axes, and is measured by one run a seed. A run is a value: its fields determine
its requests, so it can be done anywhere, repeated, and done at the same time as others.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ppd.servers.fleet.topology import Topology

Tokens = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]+\Z", max_length=100)]

POISSON = "poisson"


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of turn: the tokens it adds to the prompt, and the tokens of its answer."""

    name: Name
    new_tokens: Tokens
    output_tokens: Tokens


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conversations of one shape: a first turn, then `turns - 1` later ones, `think_s` after each answer."""

    first: Profile
    later: Profile
    turns: Annotated[int, msgspec.Meta(ge=1)] = 2
    think_s: Seconds = 0.0  # mean; drawn from an exponential distribution
    shared_prefix_tokens: Count = 0  # at the start of every conversation's first prompt, and counted in it
    image_every: Count = 0  # one in so many requests of all conversations has an image; 0: none has

    def __post_init__(self) -> None:
        if self.shared_prefix_tokens >= self.first.new_tokens:
            raise ValueError(f"shared_prefix_tokens must be below the {self.first.new_tokens} tokens of the first turn")

    @property
    def name(self) -> str:
        """`small_tiny`, as in the paper; what differs from two turns without a pause is appended."""
        extra = "".join(
            f"-{label}{value:g}"
            for label, value, usual in (
                ("turns", self.turns, 2),
                ("think", self.think_s, 0),
                ("shared", self.shared_prefix_tokens, 0),
                ("images", self.image_every, 0),
            )
            if value != usual
        )
        return f"{self.first.name}_{self.later.name}{extra}"

    @property
    def longest_context(self) -> int:
        first, later = self.first, self.later
        rest = later.new_tokens + later.output_tokens
        return first.new_tokens + first.output_tokens + (self.turns - 1) * rest


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measurement: conversations that arrive `qps` times a second, with `x` of their later turns LOCAL."""

    topology: Name
    workload: Workload
    qps: Positive  # conversations a second
    x: Share | None = None  # None: a fleet without D, or whose D have each its own, has no choice
    seed: Count = 0
    seconds: Positive = 10.0  # of arrivals that are measured; longer where `conversations` asks for more
    conversations: Count = 1  # measured at least; those that began in the warm-up are not
    warm_up_s: Seconds = 0.0  # of arrivals before those that are measured
    arrivals: str = POISSON  # or the path of a trace, whose gaps are stretched to `qps`

    def __post_init__(self) -> None:
        has_choice = Topology.parse(self.topology).has_choice
        if has_choice != (self.x is not None):
            raise ValueError(f"x: topology {self.topology} takes {'a share' if has_choice else 'none'}")

    @property
    def cell(self) -> str:
        """The run without its seed, as a path of two folders and a stem."""
        x = "" if self.x is None else f"-x{self.x:.3g}"
        return f"{self.topology}{x}/{self.workload.name}/q{self.qps:g}"

    @property
    def id(self) -> str:
        return f"{self.cell}-s{self.seed}"
