"""YAML from outside, read so that each value knows its file, line and place: what is wrong can be found.

Only what JSON has is taken: no anchors, which may grow without bound, no repeated keys, no dates, no tags of its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ..errors import ConfigError

LIMIT_BYTES: Final = 1024 * 1024
DEPTH_LIMIT: Final = 32
LARGEST: Final = float(2**53)
SHOWN_CHARACTERS: Final = 80


@dataclass(frozen=True, slots=True)
class YamlNode:
    """One value. Methods give it in the type that is asked for; ConfigError names place, value and what is allowed."""

    source: str  # the key of the config that names the file
    file: str
    line: int  # the first is 1
    path: str  # such as `plugins[2].parameters.blockSize`; empty: the document
    value: Any  # a str, int, float, bool or None; a list of nodes; or nodes by name

    def wrong(self, allowed: str) -> ConfigError:
        return ConfigError(f"{self._where} = {self._shown()}: must be {allowed}", param=self.source)

    def refused(self, why: str) -> ConfigError:
        return ConfigError(f"{self._where}: {why}", param=self.source)

    @property
    def _where(self) -> str:
        return f"{self.source}, {self.file}:{self.line}: {self.path or 'the document'}"

    def _shown(self) -> str:
        if isinstance(self.value, dict):
            return "a map"
        if isinstance(self.value, list):
            return "a list"
        text = repr(self.value)
        return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"

    def text(self, allowed: str = "text") -> str:
        if not isinstance(self.value, str) or not self.value or not self.value.isprintable():
            raise self.wrong(allowed)
        return self.value

    def whole(self, least: int = 0, most: int = int(LARGEST)) -> int:
        if not isinstance(self.value, int) or isinstance(self.value, bool) or not least <= self.value <= most:
            raise self.wrong(f"a whole number from {least} to {most}")
        return self.value

    def number(self, least: float = -LARGEST, most: float = LARGEST) -> float:
        is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        if not is_number or not math.isfinite(self.value) or not least <= self.value <= most:
            raise self.wrong(f"a finite number from {least:g} to {most:g}")
        return float(self.value)

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def items(self) -> list[YamlNode]:
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return self.value

    def texts(self) -> tuple[str, ...]:
        return tuple(item.text() for item in self.items())

    def fields(self, *known: str) -> Mapping[str, YamlNode]:
        """Of a map with no other names than these; those without a value are left out."""
        fields = self.every_field()
        for name, node in fields.items():
            if name not in known:
                raise node.refused(f"no such field; known are {', '.join(known) or 'none'}")
        return {name: node for name, node in fields.items() if node.value is not None}

    def every_field(self) -> Mapping[str, YamlNode]:
        """Of a map with any names."""
        if not isinstance(self.value, dict):
            raise self.wrong("a map")
        return self.value


def read_yaml(source: str, path: Path) -> tuple[YamlNode, str]:
    """The document of a file, and its text. source: the key of the config that names it."""
    try:
        with path.open("rb") as file:
            data = file.read(LIMIT_BYTES + 1)
        text = data.decode()
    except (OSError, ValueError) as exc:  # of the path, of UTF-8
        what = f" ({exc.strerror})" if isinstance(exc, OSError) else ""
        raise ConfigError(f"{source} = {str(path)!r}: must be a readable file in UTF-8{what}", param=source) from exc
    if len(data) > LIMIT_BYTES:
        raise ConfigError(f"{source} = {str(path)!r}: must have at most {LIMIT_BYTES} bytes", param=source)
    return parse_yaml(source, str(path), text), text


def parse_yaml(source: str, file: str, text: str) -> YamlNode:
    yaml = _library(source)
    try:
        loader = yaml.SafeLoader(text)
        with contextlib.ExitStack() as stack:
            stack.callback(loader.dispose)
            root = loader.get_single_node()
            if root is None:
                raise ConfigError(f"{source}, {file}: must hold a document", param=source)
            return _Converter(yaml, loader, source, file).node(root, "", 0)
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        mark = getattr(exc, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        told = getattr(exc, "problem", None) or getattr(exc, "reason", None) or type(exc).__name__
        raise ConfigError(f"{source}, {file}{line}: must be YAML ({told})", param=source) from exc


def _library(source: str) -> ModuleType:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as exc:
        raise ConfigError(
            f"{source}: needs PyYAML: pip install 'ppd-router[gateway]', or leave the key empty", param=source
        ) from exc
    module: ModuleType = yaml
    return module


class _Converter:
    def __init__(self, yaml: Any, loader: Any, source: str, file: str) -> None:
        self._yaml = yaml
        self._loader = loader
        self._source = source
        self._file = file
        self._seen: set[int] = set()

    def node(self, raw: Any, path: str, depth: int) -> YamlNode:
        node = YamlNode(self._source, self._file, raw.start_mark.line + 1, path, None)
        if id(raw) in self._seen:
            raise node.refused("aliases are not read")
        self._seen.add(id(raw))
        if depth > DEPTH_LIMIT:
            raise node.refused(f"nested deeper than {DEPTH_LIMIT}")
        if isinstance(raw, self._yaml.SequenceNode):
            value: Any = [self.node(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(raw.value)]
        elif isinstance(raw, self._yaml.MappingNode):
            value = dict(self._pairs(raw, node, depth))
        else:
            value = self._scalar(raw)
            if not isinstance(value, str | int | float | None):
                raise node.refused("must be text, a number, true, false or null; put quotes around text")
        return YamlNode(node.source, node.file, node.line, path, value)

    def _scalar(self, raw: Any) -> object:
        """Of another type than a document may have where its tag is not one of its text."""
        try:
            return self._loader.construct_object(raw)
        except (LookupError, AttributeError, TypeError):  # as of `!!int ""`
            return raw

    def _pairs(self, raw: Any, of: YamlNode, depth: int) -> Iterator[tuple[str, YamlNode]]:
        names = set[str]()
        for key, value in raw.value:
            name = self._scalar(key) if isinstance(key, self._yaml.ScalarNode) else None
            inner = f"{of.path}.{name}" if of.path else f"{name}"
            here = YamlNode(of.source, of.file, key.start_mark.line + 1, inner, None)
            if not isinstance(name, str) or not name.isprintable():
                raise here.refused("names must be text")
            if name in names:
                raise here.refused("named twice")
            names.add(name)
            yield name, self.node(value, inner, depth + 1)
