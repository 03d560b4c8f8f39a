from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppd.offline.load.local_tokenizer import LocalTokenizer
from ppd.offline.traces.turns import Message
from ppd.proxy.errors import ConfigError

TEMPLATE = "{{ bos_token }}{% for m in messages %} {{ m.role }} : {{ m.content }}{% endfor %} end"


def folder(tmp_path: Path, config: dict[str, Any]) -> Path:
    """A tokenizer of one token a word, made with the package itself."""
    package = pytest.importorskip("tokenizers")
    words = package.models.WordLevel({"[unk]": 0, "user": 1, ":": 2, "end": 3, "<s>": 4, "hello": 5}, unk_token="[unk]")
    tokenizer = package.Tokenizer(words)
    tokenizer.pre_tokenizer = package.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


async def test_the_folders_template_makes_the_prompt(tmp_path: Path) -> None:
    config = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}}
    tokenizer = LocalTokenizer.load(folder(tmp_path, config))
    assert await tokenizer.encode("hello hello you") == [5, 5, 0]
    assert await tokenizer.render([Message("user", "hello")]) == [4, 1, 2, 5, 3]


async def test_a_template_beside_the_config_goes_first(tmp_path: Path) -> None:
    path = folder(tmp_path, {"chat_template": TEMPLATE})
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert await LocalTokenizer.load(path).render([Message("user", "hello")]) == [5]


async def test_a_template_that_refuses_says_so(tmp_path: Path) -> None:
    path = folder(tmp_path, {"chat_template": "{{ raise_exception('no user role') }}"})
    with pytest.raises(ConfigError, match="refuses a plain conversation: no user role"):
        await LocalTokenizer.load(path).render([Message("user", "hello")])


def test_a_folder_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        LocalTokenizer.load(folder(tmp_path, {}))


def test_a_folder_that_holds_no_tokenizer_or_a_package_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: No such file|pip install") as raised:
        LocalTokenizer.load(tmp_path)
    assert "\n" not in raised.value.message
