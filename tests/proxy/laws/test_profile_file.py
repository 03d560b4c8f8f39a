from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct

from ppd.proxy.errors import ConfigError, FormatError
from ppd.proxy.laws.profile_file import (
    BUNDLED,
    LATER_COSTS,
    Check,
    Fit,
    FittedRange,
    ProfileFile,
    Status,
    StepCheck,
    Transfers,
    bundled,
    decode,
    encode,
    find,
    load,
)
from ppd.proxy.laws.step_time import EngineProfile
from tests.support.stepped_engine import profile_of

Change = Callable[[dict[str, Any]], Any]

PROFILE = profile_of(
    name="test-engine",
    status=Status.FITTED,
    costs=EngineProfile(step_s=7e-3, max_batched_tokens=2048),
    kv_capacity_tokens=400_010,
    transfers=Transfers.WHOLE,
    fit=Fit(
        fitted_on=("4R",),
        checked_on=(Check(config="2P_2D", cells=60, ttft_error_median=0.08, tpot_error_median=0.03, note="noisy"),),
        command="ppd calibrate",
    ),
)


def changed(change: Change) -> bytes:
    document = json.loads(encode(PROFILE))
    change(document)
    return json.dumps(document).encode()


def test_a_profile_is_read_as_it_was_written() -> None:
    assert decode(encode(PROFILE)) == PROFILE


def test_a_profile_without_a_fit_is_read_as_it_was_written() -> None:
    modelled = decode(changed(lambda document: document.pop("fit")))
    assert modelled.fit is None
    assert decode(encode(modelled)) == modelled


def test_a_block_that_is_not_whole_holds_nothing() -> None:
    assert PROFILE.num_blocks * PROFILE.block_size == 400_000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(version=2), r"version: must be 1, got 2"),
        (lambda d: d.update(version=2, costs=None), r"version: must be 1, got 2"),
        (lambda d: d.update(kind="ppd-run"), r"kind: must be 'ppd-engine-profile', got 'ppd-run'"),
        (lambda d: d.pop("version"), r"missing required field `version`"),
        (lambda d: d.pop("gpu"), r"missing required field `gpu`"),
        (lambda d: d.update(speed=1), r"unknown field `speed`"),
        (lambda d: d.update(status="guessed"), r"'guessed'.*\$\.status"),
        (lambda d: d.update(transfers="some"), r"'some'.*\$\.transfers"),
        (lambda d: d.update(gpu_count=0), r"gpu_count"),
        (lambda d: d.update(name="../up"), r"\$\.name"),
        (lambda d: d.update(kv_capacity_tokens=15), r"kv_capacity_tokens must hold a block"),
        (lambda d: d["costs"].pop("step_s"), r"costs\.step_s: is missing"),
        (lambda d: d["costs"].update(fly_s=1), r"costs\.fly_s: is unknown; the costs are attention_pair_s, "),
        (lambda d: d["costs"].update(step_s=-1), r"costs: step_s must not be negative, got -1"),
        (lambda d: d["costs"].update(step_s=0), r"costs: step_s must be positive, got 0"),
        (lambda d: d["costs"].update(request_s=1e300), r"costs: request_s must be at most 3600 s, got 1e\+300"),
        (lambda d: d["costs"].update(transfer_bytes_per_s=0), r"costs: transfer_bytes_per_s must be positive"),
        (lambda d: d["costs"].update(step_s="fast"), r"\$\.costs\.step_s"),
        (lambda d: d["costs"].update(kv_bytes_per_token=1.5), r"\$\.costs\.kv_bytes_per_token"),
        (lambda d: d.update(costs=[]), r"\$\.costs"),
        (lambda d: d["fit"].pop("command"), r"command.*\$\.fit"),
        (lambda d: d["fit"]["checked_on"][0].update(cells=0), r"\$\.fit\.checked_on\[0\]\.cells"),
    ],
)
def test_what_a_profile_may_not_say_is_named(change: Change, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        decode(changed(change))


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[]", b"[" * 100_000])
def test_what_is_not_json_is_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode(data)


def test_every_cost_is_needed() -> None:
    for name in set(EngineProfile.__slots__) - LATER_COSTS:
        with pytest.raises(FormatError, match=rf"costs\.{name}: is missing"):
            decode(changed(lambda document, name=name: document["costs"].pop(name)))  # type: ignore[misc]


def test_a_file_without_the_later_costs_is_read_with_none_of_them() -> None:
    def drop(document: dict[str, Any]) -> None:
        for name in LATER_COSTS:
            del document["costs"][name]

    costs = decode(changed(drop)).costs
    assert all(getattr(costs, name) == 0 for name in LATER_COSTS)


@pytest.mark.parametrize(("context", "is_guess"), [(3104, False), (3105, True)])
def test_a_fitted_profile_says_what_it_did_not_see(context: int, is_guess: bool) -> None:
    seen = FittedRange(context_tokens=3104, new_tokens=1024, qps=8.0)
    assert PROFILE.fit is not None
    profile = replace_struct(PROFILE, fit=replace_struct(PROFILE.fit, range=seen))
    assert ("3,105" in profile.beyond(context)) == is_guess
    assert decode(encode(profile)) == profile
    assert PROFILE.beyond(10**9) == ""  # it does not say what it saw


@pytest.mark.parametrize(
    ("context", "new", "reach"),
    [
        (131_072, 65_536, (131_072, 65_536)),
        (9, 65_536, (3104, 65_536)),
        (131_072, 9, (131_072, 1024)),
        (9, 9, (3104, 1024)),
    ],
)
def test_steps_that_were_checked_extend_the_reach(context: int, new: int, reach: tuple[int, int]) -> None:
    seen = FittedRange(context_tokens=3104, new_tokens=1024, qps=8.0)
    steps = StepCheck(
        source="steps.jsonl.gz",
        gpu="GPU",
        steps=65,
        context_tokens=context,
        new_tokens=new,
        error_median=0.08,
        error_p90=0.157,
        bias=-0.009,
    )
    assert PROFILE.fit is not None
    fit = replace_struct(PROFILE.fit, range=seen, steps=steps)
    profile = replace_struct(PROFILE, fit=fit)
    assert profile.reach == FittedRange(context_tokens=reach[0], new_tokens=reach[1], qps=8.0)
    assert profile.beyond(reach[0]) == ""
    how = "fitted" if reach == (3104, 1024) else "checked"
    assert f"was {how} up to {reach[0]:,}" in profile.beyond(reach[0] + 1)
    assert decode(encode(profile)) == profile
    far = replace_struct(fit, steps=replace_struct(steps, error_p90=0.31))
    assert far.reach == seen, "the law is not theirs"
    assert "was fitted up to 3,104" in replace_struct(PROFILE, fit=far).beyond(3105)
    without = replace_struct(PROFILE, fit=replace_struct(PROFILE.fit, range=None, steps=steps))
    assert without.reach is None, "nothing is said of what the fit saw"


def test_a_profile_is_found_by_name_and_by_path(tmp_path: Path) -> None:
    shipped, elsewhere = tmp_path / "shipped", tmp_path / "mine.json"
    shipped.mkdir()
    (shipped / "first.json").write_bytes(encode(PROFILE))
    (shipped / "notes.toml").write_text("")
    other = replace_name("other")
    elsewhere.write_bytes(encode(other))
    assert list(bundled(shipped)) == ["first"]
    assert find("first", shipped) == PROFILE
    assert find(str(elsewhere), shipped) == other


def replace_name(name: str) -> ProfileFile:
    return decode(changed(lambda document: document.update(name=name)))


def test_an_unknown_name_lists_those_that_ship(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_bytes(encode(PROFILE))
    with pytest.raises(ConfigError, match=r"profile = 'c': must be a, b, or the path of a profile file"):
        find("c", tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"absent\.json: No such file"):
        load(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(FormatError, match=r"bad\.json: engine profile: "):
        load(tmp_path / "bad.json")


def test_every_field_and_cost_is_documented() -> None:
    text = (BUNDLED / "README.md").read_text()
    for name in (*ProfileFile.__struct_fields__, *EngineProfile.__slots__):
        assert f"`{name}`" in text, name


def test_every_shipped_profile_is_whole() -> None:
    for name, path in bundled().items():
        profile = load(path)
        assert profile.name == name
        assert profile.source
        assert profile.licence
