"""Engine profiles of hardware that was not measured: each cost is scaled by the roofline that bounds it.

The fitted profile of one GPU and model is the base. Data sheets and model shapes (tables/profiles/hardware.toml) give
the ratios. A result is marked `modelled`, and its note says how it was computed. tables/profiles/README.md has the
formulas and what they leave out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ppd.proxy.errors import ConfigError, FormatError
from ppd.proxy.laws.profile_file import BUNDLED, ProfileFile, Status, bundled, find
from ppd.proxy.laws.step_time import EngineProfile

from ..experiment.files import UNREADABLE

HARDWARE = "hardware.toml"

Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]

NOTE = (
    "Not measured: computed from {base} by ratios of data-sheet peaks. step_s: weights over HBM bandwidth ({hbm:.0%} "
    "of peak), its host part of {host:.1f} ms kept; prefill_token_s and attention_pair_s: FLOP over FLOP/s; "
    "context_token_s: KV bytes over HBM bandwidth; all over {tp} GPU(s), plus two all-reduces a layer where there are "
    "several. Host work, decode_sequence_s and transfer_s as in the base. Formulas: tables/profiles/README.md."
)


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    bf16_flops: Positive  # a second, dense
    hbm_bytes_per_s: Positive
    memory_bytes: Positive
    nvlink_bytes_per_s: Positive  # one direction
    source: str


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    params: Count
    active_params: Count  # used for each token
    bytes_per_param: Positive
    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    hidden: Count
    tensor_parallel: tuple[Count, ...]  # degrees offered
    source: str

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim  # K and V, two bytes each

    @property
    def pair_flop(self) -> int:
        """Attention's FLOP for one token and one that it attends to: QK and PV, a multiply and an add each."""
        return 4 * self.layers * self.heads * self.head_dim


class Interconnect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    bytes_per_s: Positive  # line rate of one card
    share: Share
    source: str


class Assumptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    hbm_share: Share
    memory_share: Share
    workspace_bytes: Positive  # a GPU
    allreduce_s: Positive
    allreduce_share: Share
    least_capacity_tokens: Count


class Base(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    profile: str
    gpu: str
    model: str


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of hardware.toml."""

    version: Literal[1]
    kind: Literal["ppd-hardware"]
    assumptions: Assumptions
    base: Base
    gpus: dict[str, Gpu]
    models: dict[str, Model]
    networks: dict[str, Interconnect]

    def __post_init__(self) -> None:
        for key, value, known in (("gpu", self.base.gpu, self.gpus), ("model", self.base.model, self.models)):
            if value not in known:
                raise ValueError(f"base.{key}: must be {', '.join(known)}, got {value!r}")

    @property
    def base_gpu(self) -> Gpu:
        return self.gpus[self.base.gpu]

    @property
    def base_model(self) -> Model:
        return self.models[self.base.model]

    @staticmethod
    def load(path: Path = BUNDLED / HARDWARE) -> Hardware:
        try:
            return msgspec.toml.decode(path.read_bytes(), type=Hardware)
        except OSError as exc:
            raise FormatError(f"{path}: {exc.strerror}") from exc
        except UNREADABLE as exc:
            raise FormatError(f"{path}: {exc}") from exc


@dataclass(frozen=True, slots=True)
class HardwareChoice:
    """One engine that can be modelled; `network` is None for NVLink."""

    name: str
    gpu: Gpu
    model: Model
    gpu_count: int
    network: Interconnect | None


def profile_for(hardware: str, folder: Path = BUNDLED, *, key: str = "hardware") -> ProfileFile:
    """By name or path: read where there is a file, else computed. ConfigError names the key that asked."""
    data = Hardware.load()
    if hardware in bundled(folder) or Path(hardware).is_file():
        return find(hardware, folder)
    for choice in choices(data):
        if choice.name == hardware:
            return modelled(choice, data, find(data.base.profile, folder))
    raise ConfigError(f"{key} = {hardware!r}: must be {_allowed(data, folder)}", param=key)


def choices(data: Hardware) -> Iterator[HardwareChoice]:
    """Without the base itself, whose profile is fitted and has a file."""
    for gpu_name, gpu in data.gpus.items():
        for model_name, model in data.models.items():
            for count in model.tensor_parallel:
                if capacity_tokens(gpu, model, count, data.assumptions) < data.assumptions.least_capacity_tokens:
                    continue
                engine = f"{gpu_name}-{model_name}" + (f"-tp{count}" if count > 1 else "")
                if engine != data.base.profile:
                    yield HardwareChoice(engine, gpu, model, count, None)
                for network_name, network in data.networks.items():
                    yield HardwareChoice(f"{engine}-{network_name}", gpu, model, count, network)


def capacity_tokens(gpu: Gpu, model: Model, gpu_count: int, assumed: Assumptions) -> int:
    """Tokens whose KV fits beside the weights, over all GPUs of the engine; 0 where the weights do not fit."""
    weights = model.params * model.bytes_per_param / gpu_count
    free = gpu.memory_bytes * assumed.memory_share - weights - assumed.workspace_bytes
    return max(0, int(free * gpu_count / model.kv_bytes_per_token))


def modelled(choice: HardwareChoice, data: Hardware, base: ProfileFile) -> ProfileFile:
    host_s = max(0.0, base.costs.step_s - weights_s(data.base_gpu, data.base_model, base.gpu_count, data.assumptions))
    network = base.network if choice.network is None else choice.network.name
    return ProfileFile(
        name=choice.name,
        status=Status.MODELLED,
        model=choice.model.name,
        gpu=choice.gpu.name,
        gpu_count=choice.gpu_count,
        engine=base.engine,
        source="; ".join(dict.fromkeys(s.source for s in (choice.gpu, choice.model, choice.network, base) if s)),
        note=NOTE.format(base=base.name, hbm=data.assumptions.hbm_share, host=1000 * host_s, tp=choice.gpu_count),
        licence=base.licence,
        costs=_costs(choice, data, base, host_s),
        kv_capacity_tokens=capacity_tokens(choice.gpu, choice.model, choice.gpu_count, data.assumptions),
        block_size=base.block_size,
        max_num_seqs=base.max_num_seqs,
        transfers=base.transfers,
        network=network,
    )


def weights_s(gpu: Gpu, model: Model, gpu_count: int, assumed: Assumptions) -> float:
    """The time to read every weight once, which each step needs however few tokens it computes."""
    return model.active_params * model.bytes_per_param / gpu_count / (gpu.hbm_bytes_per_s * assumed.hbm_share)


def allreduce_token_s(gpu: Gpu, model: Model, gpu_count: int, assumed: Assumptions) -> float:
    """What one token adds to a step's all-reduces: two a layer of `hidden` two-byte numbers, as a ring over NVLink."""
    sent = 2 * (gpu_count - 1) / gpu_count * 2 * model.hidden
    return 2 * model.layers * sent / (gpu.nvlink_bytes_per_s * assumed.allreduce_share)


def _costs(choice: HardwareChoice, data: Hardware, base: ProfileFile, host_s: float) -> EngineProfile:
    gpu, model, count, assumed = choice.gpu, choice.model, choice.gpu_count, data.assumptions
    costs, base_gpu, base_model = base.costs, data.base_gpu, data.base_model
    flops = base_gpu.bf16_flops * base.gpu_count / (gpu.bf16_flops * count)
    reading = base_gpu.hbm_bytes_per_s * base.gpu_count / (gpu.hbm_bytes_per_s * count)
    allreduces_s = 2 * model.layers * assumed.allreduce_s if count > 1 else 0.0
    moving = costs.transfer_bytes_per_s / base.gpu_count
    if choice.network is not None:
        moving = min(moving, choice.network.bytes_per_s * choice.network.share)
    return replace(
        costs,
        step_s=host_s + weights_s(gpu, model, count, assumed) + allreduces_s,
        prefill_token_s=costs.prefill_token_s * flops * model.active_params / base_model.active_params
        + allreduce_token_s(gpu, model, count, assumed),
        attention_pair_s=costs.attention_pair_s * flops * model.pair_flop / base_model.pair_flop,
        context_token_s=costs.context_token_s * reading * model.kv_bytes_per_token / base_model.kv_bytes_per_token,
        kv_bytes_per_token=model.kv_bytes_per_token,
        transfer_bytes_per_s=moving * count,
    )


def _allowed(data: Hardware, folder: Path) -> str:
    degrees = sorted({count for model in data.models.values() for count in model.tensor_parallel} - {1})
    return (
        f"GPU-MODEL[-tpN][-NETWORK] with GPU {', '.join(data.gpus)}; MODEL {', '.join(data.models)}; "
        f"N {', '.join(map(str, degrees))} where it fits; NETWORK {', '.join(data.networks)} (none: NVLink); "
        f"or the name ({', '.join(bundled(folder)) or 'none ship'}) or path of a profile file"
    )
