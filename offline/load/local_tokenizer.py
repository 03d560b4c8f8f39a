"""A tokenizer on disk, for endpoints without /tokenize."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ppd.proxy.errors import ConfigError

from ..traces.turns import Message


class LocalTokenizer:
    """`tokenizer.json` and the chat template of a folder in Hugging Face's layout."""

    def __init__(self, encoder: Any, template: Any, names: dict[str, str]) -> None:
        self._encoder = encoder
        self._template = template
        self._names = names

    @classmethod
    def load(cls, folder: Path) -> LocalTokenizer:
        """ConfigError names the extra, or the file that is missing."""
        try:
            module = importlib.import_module("tokenizers")
        except ModuleNotFoundError as exc:
            raise ConfigError("tokenizer: needs the package tokenizers: pip install tokenizers") from exc
        try:
            encoder = module.Tokenizer.from_str((folder / "tokenizer.json").read_text())
            settings = _settings(folder)
        except OSError as exc:
            raise ConfigError(f"tokenizer: {exc.filename}: {exc.strerror}", param="tokenizer") from exc
        except Exception as exc:  # the package raises nothing narrower for a bad file
            raise ConfigError(f"tokenizer: {folder} cannot be read: {exc}", param="tokenizer") from exc
        names = {name: _text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return cls(encoder, _compiled(folder, settings), names)

    async def encode(self, text: str) -> list[int]:
        return self._ids(text)

    async def render(self, messages: Sequence[Message]) -> list[int]:
        said = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._ids(self._template.render(messages=said, add_generation_prompt=True, **self._names))
        except TemplateError as exc:
            raise ConfigError(f"tokenizer: its chat template refuses a plain conversation: {exc}") from exc

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.exists() else {}


def _compiled(folder: Path, settings: dict[str, Any]) -> Any:
    # Rendered as Hugging Face's library does: in a sandbox, with its two helper functions.
    beside = folder / "chat_template.jinja"
    text = beside.read_text() if beside.exists() else settings.get("chat_template")
    if not isinstance(text, str):
        raise ConfigError(f"tokenizer: {folder} has no chat template", param="tokenizer")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _today
    return environment.from_string(text)


def _refuse(message: str) -> str:
    raise TemplateError(message)


def _today(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _text(token: Any) -> str:
    # Some files hold a special token's text inside an object.
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
