"""Fits the costs of the timing law to times of steps, and makes an engine profile of them. Pure.

The law (`step_time_s`) is linear in its five costs. They are fitted by non-negative least squares to the medians of the
points. Errors are relative to a point's time, so a decode step of 8 ms counts as much as a prefill of 500 ms.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from scipy.optimize import nnls

from ppd.offline.calibration.steps import StepRecord, Steps
from ppd.offline.experiment.statistics import percentile
from ppd.proxy.errors import ConfigError
from ppd.proxy.laws.profile_file import ProfileFile, Status, Transfers
from ppd.proxy.laws.step_time import EngineProfile, step_time_s

TERMS = ("step_s", "decode_sequence_s", "context_token_s", "prefill_token_s", "attention_pair_s")
_PEER = "gpu-to-gpu"


@dataclass(frozen=True, slots=True)
class Residual:
    """A point's measured time and the law's, in seconds."""

    step: StepRecord
    measured_s: float
    law_s: float

    @property
    def error(self) -> float:
        return self.law_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class StepFit:
    costs: EngineProfile
    residuals: tuple[Residual, ...]

    def error(self, share: float) -> float:
        """The absolute relative error that `share` of the points stay below."""
        return percentile([abs(residual.error) for residual in self.residuals], share)


def fit_steps(steps: Sequence[StepRecord], base: EngineProfile) -> StepFit:
    known = [(step, step.median_s) for step in steps if step.median_s is not None]
    if len(known) < len(TERMS):
        raise ConfigError(f"steps: {len(known)} points were measured, the law has {len(TERMS)} costs")
    times = np.array([seconds for _, seconds in known])
    matrix = np.array([(1.0, *map(float, step.load)) for step, _ in known]) / times[:, None]
    sizes = matrix.max(axis=0)
    sizes[sizes == 0] = 1.0
    found, _ = nnls(matrix / sizes, np.ones(len(known)))
    values = dict(zip(TERMS, (found / sizes).tolist(), strict=True))
    costs = replace(base, **values)
    return StepFit(costs, tuple(Residual(step, s, step_time_s(costs, *step.load)) for step, s in known))


def profile(steps: Steps, base: ProfileFile | None, name: str) -> tuple[ProfileFile, StepFit]:
    """Step costs from the fit; those of host work and transfers, which a bare step does not have, from `base`."""
    others, whence = (base.costs, base.name) if base else (EngineProfile(), "the built-in profile")
    head = steps.head
    others = replace(others, kv_bytes_per_token=head.kv_bytes_per_token)
    peer = max((copy.bytes_per_s for copy in steps.copies if copy.copy == _PEER), default=None)
    if peer is not None:
        others = replace(others, transfer_bytes_per_s=peer)
    fit = fit_steps(steps.steps, others)
    known = {*TERMS, "kv_bytes_per_token"} | ({"transfer_bytes_per_s"} if peer is not None else set())
    missing = ", ".join(field.name for field in fields(EngineProfile) if field.name not in known)
    note = (
        f"A step of a network with {head.name}'s shapes and random {head.dtype} weights, not an engine: no scheduler, "
        f"no HTTP, no sampling, contexts equally long, KV not paged. {missing}: not measured, from {whence}. The law's "
        f"error over {len(fit.residuals)} steps: median {fit.error(0.5):.1%}, 90 % below {fit.error(0.9):.1%}."
    )
    return (
        ProfileFile(
            name=name,
            status=Status.FITTED,
            model=head.name,
            gpu=head.device,
            gpu_count=1,
            engine=f"PyTorch {head.torch}{f' with CUDA {head.cuda}' if head.cuda else ''}"
            f"{', CUDA graphs' if head.graphs else ''}",
            source=f"benchmarks/interference --torch, {head.started}",
            note=note,
            licence="Apache-2.0",
            costs=fit.costs,
            kv_capacity_tokens=head.kv_tokens,
            transfers=base.transfers if base else Transfers.MISSING,
            network="GPU to GPU on one machine" if peer is not None else base.network if base else "not measured",
        ),
        fit,
    )


def markdown(profile_: ProfileFile, fit: StepFit, skipped: Sequence[StepRecord], base: ProfileFile | None) -> str:
    """With a base, its own law stands beside the fitted one."""
    costs = [f"| `{name}` | {getattr(profile_.costs, name):.3e}{_cost_of(base, name)} |" for name in TERMS]
    rows = [
        f"| {r.step.decode:,} | {r.step.context:,} | {r.step.prefill:,} | {r.step.cached:,} "
        f"| {1000 * r.measured_s:.3f} | {_spread(r.step):.1%} | {1000 * r.law_s:.3f} | {r.error:+.1%}{_by(base, r)} |"
        for r in fit.residuals
    ]
    more = f" | {base.name} |" if base else " |"
    left_out = [
        f"- {s.decode:,} x {s.context:,}, {s.prefill:,} after {s.cached:,}: not measured, {s.skipped}" for s in skipped
    ]
    return "\n".join(
        [
            f"# Engine steps: {profile_.model} on {profile_.gpu}",
            "",
            profile_.note,
            "",
            f"| cost | s{more}",
            f"| --- | ---:{' | ---:' if base else ''} |",
            *costs,
            "",
            f"| decoding | context | chunk | cached | median, ms | spread | fitted, ms | error{more}",
            f"| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---:{' | ---:' if base else ''} |",
            *rows,
            *(["", *left_out] if left_out else []),
            "",
        ]
    )


def _cost_of(base: ProfileFile | None, name: str) -> str:
    return f" | {getattr(base.costs, name):.3e}" if base else ""


def _by(base: ProfileFile | None, one: Residual) -> str:
    if base is None:
        return ""
    law_s = step_time_s(base.costs, *one.step.load)
    return f" | {1000 * law_s:.3f}, {law_s / one.measured_s - 1:+.1%}"


def _spread(step: StepRecord) -> float:
    if step.seconds is None or len(step.seconds) < 2:
        return 0.0
    low, _, high = statistics.quantiles(step.seconds, n=4)
    return (high - low) / statistics.median(step.seconds)
