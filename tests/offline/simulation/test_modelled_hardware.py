from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ppd.offline.simulation.modelled_hardware import (
    Hardware,
    allreduce_token_s,
    capacity_tokens,
    choices,
    modelled,
    profile_for,
    weights_s,
)
from ppd.proxy.errors import ConfigError, FormatError
from ppd.proxy.laws.profile_file import BUNDLED, ProfileFile, Status, Transfers, bundled, decode, encode
from ppd.proxy.laws.step_time import EngineProfile
from tests.support.stepped_engine import profile_of

DATA = Hardware.load()
FITTED = profile_of(
    name="h100-llama-3.1-8b",
    status=Status.FITTED,
    model="Llama-3.1-8B",
    kv_capacity_tokens=397_000,
    transfers=Transfers.WHOLE,
)
SHAPE = {  # MLP, vocabulary, parameters besides the matrices: biases of q, k, v, or norms of q and k; a layer
    "llama-3.1-8b": (14_336, 128_256, 0),
    "qwen2.5-14b": (13_824, 152_064, (40 + 2 * 8) * 128),
    "qwen3-32b": (25_600, 151_936, 2 * 128),
    "llama-3.1-70b": (28_672, 128_256, 0),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / f"{FITTED.name}.json").write_bytes(encode(FITTED))
    return tmp_path


def derived(name: str) -> ProfileFile:
    (choice,) = (choice for choice in choices(DATA) if choice.name == name)
    return modelled(choice, DATA, FITTED)


def test_the_base_comes_from_its_file(folder: Path) -> None:
    assert profile_for("h100-llama-3.1-8b", folder) == FITTED
    assert profile_for(str(folder / "h100-llama-3.1-8b.json"), folder) == FITTED


def test_scaling_to_the_base_itself_changes_nothing() -> None:
    (choice,) = (choice for choice in choices(DATA) if choice.name == "h100-llama-3.1-8b-400g")
    same = modelled(replace(choice, network=None), DATA, FITTED).costs
    for name in EngineProfile.__slots__:
        assert getattr(same, name) == pytest.approx(getattr(FITTED.costs, name)), name


@pytest.mark.parametrize("name", [choice.name for choice in choices(DATA)])
def test_what_nobody_measured_says_so(name: str) -> None:
    profile = derived(name)
    assert profile.status is Status.MODELLED
    assert "Not measured" in profile.note
    assert profile.fit is None
    assert decode(encode(profile)) == profile


def hardware_names(folder: Path) -> tuple[str, ...]:
    """Every name that `profile_for` takes."""
    return (*bundled(folder), *(choice.name for choice in choices(DATA)))


def test_every_name_is_taken(folder: Path) -> None:
    names = hardware_names(folder)
    assert len(set(names)) == len(names)
    for name in names:
        assert profile_for(name, folder).name == name


def test_names_that_the_paper_and_its_peers_use_are_there(folder: Path) -> None:
    assert {
        "h100-llama-3.1-8b",
        "a100-llama-3.1-8b-100g",
        "h200-llama-3.1-70b-tp4-400g",
        "b200-qwen3-32b",
        "h100-qwen2.5-14b",
    } <= set(hardware_names(folder))


def test_an_engine_without_room_for_kv_is_not_offered(folder: Path) -> None:
    names = hardware_names(folder)
    assert "h100-llama-3.1-70b-tp2" not in names
    assert "h200-llama-3.1-70b-tp2" in names
    assert capacity_tokens(DATA.gpus["h100"], DATA.models["llama-3.1-70b"], 1, DATA.assumptions) == 0


@pytest.mark.parametrize(
    ("faster", "slower", "cost"),
    [
        ("h200-llama-3.1-8b", "a100-llama-3.1-8b", "step_s"),
        ("h200-llama-3.1-8b", "a100-llama-3.1-8b", "context_token_s"),
        ("b200-llama-3.1-8b", "h200-llama-3.1-8b", "prefill_token_s"),
        ("b200-llama-3.1-8b", "a100-llama-3.1-8b", "attention_pair_s"),
        ("h100-qwen2.5-14b", "h100-qwen3-32b-tp2", "prefill_token_s"),
        ("h100-llama-3.1-70b-tp8", "h100-llama-3.1-70b-tp4", "prefill_token_s"),
        ("h100-llama-3.1-70b-tp8", "h100-llama-3.1-70b-tp4", "step_s"),
    ],
)
def test_more_of_what_bounds_a_cost_makes_it_less(faster: str, slower: str, cost: str) -> None:
    assert getattr(derived(faster).costs, cost) < getattr(derived(slower).costs, cost)


def test_an_h200_differs_from_an_h100_by_its_memory_only() -> None:
    h200 = derived("h200-llama-3.1-8b").costs
    assert h200.prefill_token_s == FITTED.costs.prefill_token_s
    assert h200.context_token_s == pytest.approx(FITTED.costs.context_token_s * 3.35 / 4.8)


def test_a_step_is_host_work_and_reading_the_weights() -> None:
    gpu, model, assumed = DATA.gpus["h100"], DATA.models["llama-3.1-8b"], DATA.assumptions
    reading_s = 7_504_924_672 * 2 / (3.35e12 * 0.85)
    assert weights_s(gpu, model, 1, assumed) == pytest.approx(reading_s)
    host_s = FITTED.costs.step_s - reading_s
    assert derived("b200-llama-3.1-8b").costs.step_s == pytest.approx(host_s + reading_s * 3.35 / 8)


def test_a_base_faster_than_the_roofline_has_no_host_part() -> None:
    fast = msgspec.structs.replace(FITTED, costs=EngineProfile(step_s=1e-3))
    (choice,) = (choice for choice in choices(DATA) if choice.name == "h200-llama-3.1-8b")
    step_s = modelled(choice, DATA, fast).costs.step_s
    assert step_s == weights_s(choice.gpu, choice.model, 1, DATA.assumptions)


def test_several_gpus_pay_for_their_all_reduces() -> None:
    gpu, model, assumed = DATA.gpus["h100"], DATA.models["llama-3.1-70b"], DATA.assumptions
    assert allreduce_token_s(gpu, model, 1, assumed) == 0
    # 160 all-reduces of 8,192 numbers of two bytes; each GPU of four sends 1.5 times that, at 315 GB/s.
    assert allreduce_token_s(gpu, model, 4, assumed) == pytest.approx(160 * 1.5 * 16_384 / 315e9)
    two, four = derived("h100-llama-3.1-8b-tp2").costs, FITTED.costs
    assert two.prefill_token_s > four.prefill_token_s / 2


@pytest.mark.parametrize(
    ("name", "bytes_per_s"),
    [
        ("h200-llama-3.1-8b", 16e9),  # what the fitted connector reaches over NVLink
        ("h200-llama-3.1-8b-400g", 16e9),  # 40 GB/s would do more, the connector does not
        ("h200-llama-3.1-8b-100g", 10e9),
        ("h200-llama-3.1-70b-tp4-100g", 40e9),  # a card for each GPU
    ],
)
def test_a_transfer_is_bound_by_the_connector_or_the_network(name: str, bytes_per_s: float) -> None:
    assert derived(name).costs.transfer_bytes_per_s == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("name", list(SHAPE))
def test_parameters_are_those_of_the_shapes(name: str) -> None:
    model, (mlp, vocabulary, other) = DATA.models[name], SHAPE[name]
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    layer = model.hidden * (2 * queries + 2 * keys + 3 * mlp + 2) + other
    embedding = vocabulary * model.hidden
    assert model.params == model.layers * layer + model.hidden + 2 * embedding
    assert model.active_params == model.params - embedding


def test_kv_of_the_base_model_is_what_the_timing_law_takes_for_it() -> None:
    assert DATA.models["llama-3.1-8b"].kv_bytes_per_token == EngineProfile().kv_bytes_per_token


def test_an_unknown_name_is_answered_with_how_names_are_made(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        profile_for("h300-gpt", folder)
    assert caught.value.message.startswith("hardware = 'h300-gpt': must be GPU-MODEL[-tpN][-NETWORK] with GPU a100, ")
    assert "h100-llama-3.1-8b" in caught.value.message


def test_without_the_fitted_profile_nothing_can_be_computed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"profile = 'h100-llama-3\.1-8b'"):
        profile_for("h200-llama-3.1-8b", tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("version = 1", "version = 2", "version"),
        ('kind = "ppd-hardware"', 'kind = "x"', "kind"),
        ("bf16_flops = 312e12", "bf16_flop = 312e12", "bf16_flop"),
        ("hbm_share = 0.85", "hbm_share = 1.85", "hbm_share"),
        ('gpu = "h100"', 'gpu = "h101"', "base.gpu: must be a100, h100, h200, b200, got 'h101'"),
        ("version = 1", "version =", "hardware.toml"),
    ],
)
def test_a_wrong_data_file_is_one_clear_line(old: str, new: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "hardware.toml"
    path.write_text((BUNDLED / "hardware.toml").read_text().replace(old, new, 1))
    with pytest.raises(FormatError, match=said):
        Hardware.load(path)
