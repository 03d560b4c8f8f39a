"""Where measurements for a calibration come from, and what is known of how they were made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ppd.proxy.errors import ConfigError, FormatError
from ppd.proxy.laws.profile_file import FittedRange, ProfileFile, SlowWorker, Status, Transfers
from ppd.servers.fleet.topology import Topology

from ..simulation.setup import Setup
from ..sweep.folder import SweepFolder
from ..tables import published_cells
from .fit import START
from .observations import Observation, from_published, from_sweep

SEEDS = 2  # for a published cell, whose own arrivals are not known
RETOKENISED = 0.5  # of 0.5, 0.75 and 1, the errors are least with this share
FIT_SEEDS = 1  # of them, for the fit


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the grid with errors of its own."""

    name: str
    context: str | None = None  # None: any
    above_qps: float = 0.0  # excluded
    to_qps: float = float("inf")  # included

    def holds(self, one: Observation) -> bool:
        return self.context in (None, one.context) and self.above_qps < one.qps <= self.to_qps

    def of(self, observations: list[Observation]) -> list[Observation]:
        return [one for one in observations if self.holds(one)]


@dataclass(frozen=True, slots=True)
class CalibrationSource:
    """Measured cells, the setup that resembles how they were made, and the regions to fit, to check and to report."""

    observations: list[Observation]
    setup: Setup
    fitted_on: tuple[str, ...]
    fit_regions: tuple[Region, ...]
    check_region: Region
    other_regions: tuple[Region, ...] = ()
    fit_seeds: int | None = None  # runs of a cell that are used to fit; None: all

    def for_fit(self, configs: tuple[str, ...]) -> list[Observation]:
        chosen = [one for region in self.fit_regions for one in region.of(self.observations) if one.config in configs]
        return [replace(one, runs=one.runs[: self.fit_seeds]) for one in chosen]

    @property
    def range(self) -> FittedRange:
        """Of what is fitted to. ConfigError where that is nothing."""
        fitted = self.for_fit(self.fitted_on)
        if not fitted:
            names = ", ".join(self.fitted_on)
            raise ConfigError(
                f"nothing to fit on: no cell of {names} finished at a load that is fitted to", param="fit_on"
            )
        workloads = [one.runs[0].workload for one in fitted]
        return FittedRange(
            context_tokens=max(each.longest_context for each in workloads),
            new_tokens=max(max(each.first.new_tokens, each.later.new_tokens) for each in workloads),
            qps=max(one.qps for one in fitted),
        )

    @property
    def configs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.config for one in self.observations))


PUSHING = ("p2p_nccl", "whole")  # how an origin's `connector` begins where whole prompts are moved
USUAL_CAPACITY_TOKENS = 400_000


def open_source(path: Path, kv_capacity_tokens: int | None = None) -> CalibrationSource:
    """A sweep's folder, or the rows of a published grid. FormatError where they hold nothing to go by.

    kv_capacity_tokens: of one engine; no record holds it.
    """
    return _sweep(path, kv_capacity_tokens) if path.is_dir() else _published(path, kv_capacity_tokens)


def _some(path: Path, observations: list[Observation]) -> list[Observation]:
    if not observations:
        raise FormatError(f"{path}: holds no cell whose requests all finished, so there is nothing to fit")
    return observations


def _published(path: Path, kv_capacity_tokens: int | None) -> CalibrationSource:
    # Beyond these regions the client's 50 connections are all in use, and the figures measure the client.
    small, large = (
        Region("small context, QPS 0.5 to 8", "small", to_qps=8),
        Region("large, 0.5 to 2", "large", to_qps=2),
    )
    setup = Setup(
        profile=_published_profile(kv_capacity_tokens or USUAL_CAPACITY_TOKENS),
        connections=published_cells.CONNECTIONS,
        retokenised_replies=RETOKENISED,
        slow=SlowWorker(
            topology="4R",
            worker="R1",
            request_s=2e-3,
            prefill_token_s=12e-6,
            context_token_s=100e-9,
            mean_context_token_s=400e-9,
        ),
        published_routing=True,
        unrecognised=published_cells.UNRECOGNISED,
    )
    return CalibrationSource(
        observations=_some(path, from_published(path, SEEDS)),
        setup=setup,
        fitted_on=("4R", "1P_3D", "1P_3pD"),
        fit_regions=(small, large),
        fit_seeds=FIT_SEEDS,
        check_region=small,
        other_regions=(
            large,
            Region("small context, QPS 10 to 20", "small", above_qps=8),
            Region("large context, QPS 4 to 20", "large", above_qps=2),
        ),
    )


def _published_profile(kv_capacity_tokens: int) -> ProfileFile:
    return ProfileFile(
        name="h100-llama-3.1-8b",
        status=Status.FITTED,
        model="Llama-3.1-8B",
        gpu="NVIDIA H100 80GB HBM3",
        gpu_count=1,
        engine="vLLM 0.13 development build",
        source="https://github.com/freelulul/vllm-ppd at commit 87fc373f2, measurements of 2026-01-22",
        note=(
            "By means of whole requests: P2pNccl over NVLink, one machine with 4 GPUs. attention_pair_s is "
            "arithmetic and kv_capacity_tokens an estimate (0.85 of 80 GB less 16 GB of weights): the grid tells "
            "neither."
        ),
        licence="Apache-2.0",
        costs=START,
        kv_capacity_tokens=kv_capacity_tokens,
        max_num_seqs=256,
        transfers=Transfers.WHOLE,
        network="NVLink",
    )


def _sweep(path: Path, kv_capacity_tokens: int | None) -> CalibrationSource:
    # Every configuration is fitted unless the caller holds some back.
    results = list(SweepFolder(path).results())
    observations = _some(path, from_sweep(results))
    first = results[0]
    origin, workers = first.origin, Topology.parse(first.run.topology).workers
    pushes = origin.connector.startswith(PUSHING)
    assumed = ["attention_pair_s is arithmetic"]
    if kv_capacity_tokens is None:
        assumed.append(f"kv_capacity_tokens is assumed to be {USUAL_CAPACITY_TOKENS:,}")
    profile = ProfileFile(
        name=path.resolve().name,
        status=Status.FITTED,
        model=origin.model,
        gpu=origin.gpu,
        gpu_count=max(1, origin.gpu_count // workers),
        engine=origin.engine,
        source=f"a sweep of {len(results)} runs",
        note="; ".join(filter(None, ("By means of whole requests", *assumed, origin.note))),
        licence="",
        costs=START,
        kv_capacity_tokens=kv_capacity_tokens or USUAL_CAPACITY_TOKENS,
        transfers=Transfers.WHOLE if pushes else Transfers.MISSING,
        network=origin.connector,
    )
    everything = Region("all cells")
    configs = tuple(dict.fromkeys(one.config for one in observations))
    return CalibrationSource(observations, Setup(profile=profile), configs, (everything,), everything)
