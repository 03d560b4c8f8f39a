"""A tokenizer on disk, for endpoints without /tokenize."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError

from ppd.proxy.errors import ConfigError
from ppd.proxy.tokenizer.tokenizer_folder import TokenizerFolder

from ..traces.turns import Message


class LocalTokenizer:
    """`tokenizer.json` and the chat template of a folder in Hugging Face's layout."""

    def __init__(self, folder: TokenizerFolder) -> None:
        self._folder = folder

    @classmethod
    def load(cls, folder: Path) -> LocalTokenizer:
        """ConfigError names the extra, or the file that is missing."""
        return cls(TokenizerFolder.load(folder))

    async def encode(self, text: str) -> list[int]:
        return self._folder.ids(text)

    async def render(self, messages: Sequence[Message]) -> list[int]:
        said = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._folder.ids(self._folder.template.render(said, add_generation_prompt=True))
        except TemplateError as exc:
            raise ConfigError(f"tokenizer: its chat template refuses a plain conversation: {exc}") from exc
