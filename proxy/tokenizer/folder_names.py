"""Which tokenizer a model has: the one folder of the config, or the folder in it that has the model's name."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..errors import UNREADABLE, ConfigError

_FILE = "tokenizer.json"
_PACKAGES = ("tokenizers", "jinja2")


class FolderNames:
    """ConfigError where the path, a package or a template is missing; whether each can be read, its reader finds out.

    The path holds a tokenizer for all models; or a folder for each model, by its served name, such as `Qwen/Qwen3-8B`.
    """

    def __init__(self, path: str) -> None:
        root = Path(path)
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise _refused(path, f"needs the package {missing[0]}: pip install 'ppd-router[tokenizer]'")
        try:
            self._for_all = str(root) if (root / _FILE).is_file() else ""
            found = [] if self._for_all else [*root.glob(f"*/{_FILE}"), *root.glob(f"*/*/{_FILE}")]
        except OSError as exc:  # of a name that no file can have, or in a folder that is closed
            raise _refused(path, f"must be a folder that can be read ({exc.strerror})") from exc
        self._by_model = {str(file.parent.relative_to(root)): str(file.parent) for file in found}
        if not self._for_all and not found:
            raise _refused(path, f"must be a folder with {_FILE}, or one with such a folder for each model")
        for folder in self.all():
            if not _has_template(Path(folder)):
                raise _refused(path, f"{folder} has no chat template (chat_template.jinja, tokenizer_config.json)")

    def all(self) -> list[str]:
        return [self._for_all] if self._for_all else sorted(self._by_model.values())

    def of(self, model: str, aliases: Mapping[str, str]) -> str | None:
        """aliases: the one name that stands for each other name of a model."""
        if self._for_all:
            return self._for_all
        family = aliases.get(model, model)
        names = [model, family, *(name for name, stands in aliases.items() if stands == family)]
        return next((self._by_model[name] for name in names if name in self._by_model), None)


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        settings = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes(), type=dict[str, msgspec.Raw])
    except (OSError, *UNREADABLE):
        return False
    return "chat_template" in settings


def _refused(path: str, why: str) -> ConfigError:
    return ConfigError(f"tokenizer = {path!r}: {why}", param="tokenizer")
