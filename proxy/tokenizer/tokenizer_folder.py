"""A tokenizer on disk, in Hugging Face's layout: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import TemplateError

from ..errors import ConfigError
from .chat_template import ChatTemplate

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerFolder(msgspec.Struct, frozen=True):
    """encoder: a `tokenizers.Tokenizer`."""

    encoder: Any
    template: ChatTemplate

    @classmethod
    def load(cls, folder: Path) -> TokenizerFolder:
        """ConfigError names the package that is missing, or the file and what is wrong with it."""
        try:
            module = importlib.import_module("tokenizers")
        except ModuleNotFoundError as exc:
            raise ConfigError("tokenizer: needs the package tokenizers: pip install tokenizers") from exc
        try:
            encoder = module.Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
            encoder.no_truncation()
            encoder.no_padding()
            settings = _settings(folder)
        except OSError as exc:
            raise ConfigError(f"tokenizer: {exc.filename}: {exc.strerror}", param="tokenizer") from exc
        except Exception as exc:  # the package raises nothing narrower for a bad file
            raise ConfigError(f"tokenizer: {folder} cannot be read: {exc}", param="tokenizer") from exc
        return cls(encoder, _template(folder, settings))

    def ids(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        found: list[int] = self.encoder.encode(text, add_special_tokens=add_special_tokens).ids
        return found


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.exists() else {}


def _template(folder: Path, settings: dict[str, Any]) -> ChatTemplate:
    beside = folder / "chat_template.jinja"
    told = beside.read_text(encoding="utf-8") if beside.exists() else settings.get("chat_template")
    with_tools = None
    if isinstance(told, list):  # older folders name several
        named = {one.get("name"): one.get("template") for one in told if isinstance(one, dict)}
        told, with_tools = named.get("default"), named.get("tool_use")
    if not isinstance(told, str):
        raise ConfigError(f"tokenizer: {folder} has no chat template", param="tokenizer")
    names = {name: text for name in _NAMES if (text := _text(settings.get(name)))}
    try:
        return ChatTemplate(told, names, with_tools)
    except TemplateError as exc:
        raise ConfigError(f"tokenizer: {folder}: its chat template is none: {exc}", param="tokenizer") from exc


def _text(token: Any) -> str:
    # Some files hold a special token's text inside an object.
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
