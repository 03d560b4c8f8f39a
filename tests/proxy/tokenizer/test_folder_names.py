from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ppd.proxy.errors import ConfigError
from ppd.proxy.tokenizer.folder_names import FolderNames
from tests.proxy.tokenizer.tokenizer_folders import write_tokenizer


def test_one_folder_is_for_all_models(tmp_path: Path) -> None:
    names = FolderNames(str(write_tokenizer(tmp_path)))
    assert [names.of(model, {}) for model in ("a", "b/c")] == [str(tmp_path)] * 2


def test_each_model_has_the_folder_of_its_name(tmp_path: Path) -> None:
    for name in ("tiny", "Org/Model"):
        write_tokenizer(tmp_path / name)
    names, aliases = FolderNames(str(tmp_path)), {"latest": "Org/Model", "zoo": "latest2", "tiny": "big"}
    found = {
        model: names.of(model, aliases) for model in ("tiny", "big", "Org/Model", "latest", "other", "../tiny", "")
    }
    tiny, own = str(tmp_path / "tiny"), str(tmp_path / "Org" / "Model")
    expected = {"tiny": tiny, "big": tiny, "Org/Model": own, "latest": own}
    assert found == {**expected, "other": None, "../tiny": None, "": None}
    assert names.all() == sorted((tiny, own))


def test_a_path_without_any_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tokenizer = .*: must be a folder with tokenizer\.json, or one with"):
        FolderNames(str(tmp_path / "none"))
    write_tokenizer(tmp_path / "model", template=None)
    with pytest.raises(ConfigError, match=r"^tokenizer = .*model has no chat template"):
        FolderNames(str(tmp_path))
    for settings in ("{", '{"more": ' + "[" * 5000 + "]" * 5000 + "}"):
        (tmp_path / "model" / "tokenizer_config.json").write_text(settings)
        with pytest.raises(ConfigError, match="has no chat template"):
            FolderNames(str(tmp_path))
    (tmp_path / "model" / "chat_template.jinja").write_text("beside")
    assert FolderNames(str(tmp_path)).of("model", {})


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package tokenizers: pip install 'ppd-router\[tokenizer\]'"):
        FolderNames(str(write_tokenizer(tmp_path)))
