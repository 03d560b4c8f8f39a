"""A sweep's axes: which runs there are, and how often each cell is measured.

Every combination of topology, x, workload and QPS is a cell. A cell gets `seeds` runs, then one more at a time, up to
`max_seeds`, until the mean TTFT of its later turns is known to `precision`. tables/README.md explains what comes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Annotated, Any, Final

import msgspec

from ppd.servers.fleet.topology import Topology

from ..experiment.run import POISSON, Count, Name, Positive, Profile, Run, Seconds, Share, Workload

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
HOW_OFTEN: Final = ("seeds", "max_seeds", "precision")  # may change when a sweep is resumed: no run depends on them


class Arms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A topology and the shares of LOCAL turns measured on it; no shares where it has no choice."""

    topology: Name
    x: tuple[Share, ...]


class Grid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`grid_file` checks what may be in it."""

    arms: tuple[Arms, ...]
    first: tuple[Profile, ...]
    later: tuple[Profile, ...]
    qps: tuple[Positive, ...]  # conversations a second
    turns: tuple[AtLeastOne, ...] = (2,)
    think_s: tuple[Seconds, ...] = (0.0,)
    shared_prefix_tokens: tuple[Count, ...] = (0,)
    image_every: tuple[Count, ...] = (0,)
    arrivals: str = POISSON  # or the path of a trace in one of the formats of `traces`
    seconds: Positive = 10.0
    conversations: AtLeastOne = 1  # measured in a run, at least
    warm_up_s: Seconds = 0.0
    seeds: AtLeastOne = 1  # runs a cell, at least
    max_seeds: AtLeastOne = 1
    precision: Share = 0.05  # half the 95 % interval over the mean; 0: every cell gets `max_seeds`

    def runs(self, seed: int) -> Iterator[Run]:
        """One run a cell. The arms of a decision follow each other, so that an unfinished sweep has pairs."""
        for arms, workload, qps in product(self.arms, self.workloads(), self.qps):
            for x in arms.x or (None,):
                yield Run(
                    topology=arms.topology,
                    workload=workload,
                    qps=qps,
                    x=x,
                    seed=seed,
                    seconds=self.seconds,
                    conversations=self.conversations,
                    warm_up_s=self.warm_up_s,
                    arrivals=self.arrivals,
                )

    def on(self, topologies: Iterable[str]) -> Grid:
        """The same workloads on these topologies, with the shares of LOCAL turns that any of its own has."""
        shares = tuple(dict.fromkeys(x for arms in self.arms for x in arms.x)) or (0.0, 1.0)
        names = dict.fromkeys(topologies)
        return msgspec.structs.replace(
            self, arms=tuple(Arms(topology=name, x=shares if Topology.parse(name).has_choice else ()) for name in names)
        )

    def workloads(self) -> Iterator[Workload]:
        for first, later, turns, think_s, shared, images in product(
            self.first, self.later, self.turns, self.think_s, self.shared_prefix_tokens, self.image_every
        ):
            yield Workload(
                first=first,
                later=later,
                turns=turns,
                think_s=think_s,
                shared_prefix_tokens=shared,
                image_every=images,
            )

    def difference(self, other: Grid) -> str:
        """The first axis that differs, with both values; empty if none does. HOW_OFTEN does not count."""
        for name in self.__struct_fields__:
            mine, others = getattr(self, name), getattr(other, name)
            if name not in HOW_OFTEN and mine != others:
                return f"{_KEYS.get(name, name)}: {shown(mine)} there, {shown(others)} asked for"
        return ""


_KEYS: Final = {"arms": "topologies"}  # the name of a field in a grid file


def shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 100 else f"{text[:100]}..."
