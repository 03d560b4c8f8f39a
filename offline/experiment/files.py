"""Files on disk: written whole or not at all, and read with their path in every error.

Records are gzipped JSON lines: a head with `kind` and `version`, then one row a line.
"""

from __future__ import annotations

import errno
import gzip
import os
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from ppd.proxy.errors import ConfigError, FormatError

T = TypeVar("T")
Head = TypeVar("Head")

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading JSON or TOML raises that is damaged, or nested too deep."""

_encoder = msgspec.json.Encoder()


class _Version(msgspec.Struct):
    version: int
    kind: str


def encode_rows(head: msgspec.Struct, rows: Iterable[msgspec.Struct]) -> bytes:
    """Deterministic: the same head and rows give the same bytes."""
    return gzip.compress(_encoder.encode_lines([head, *rows]), compresslevel=5, mtime=0)


def decode_rows(
    data: bytes, head: type[Head], row: Callable[[bytes], T], *, kind: str, version: int
) -> tuple[Head, tuple[T, ...]]:
    """Each row is decoded by `row`. FormatError names what is missing, unknown or of another version."""
    try:
        first, *rows = gzip.decompress(data).splitlines()
        found = msgspec.json.decode(first, type=_Version)
        if found.kind != kind:
            raise FormatError(f"kind: must be {kind!r}, got {found.kind!r}")
        if found.version != version:
            raise FormatError(f"version: must be {version}, got {found.version}")
        return msgspec.json.decode(first, type=head), tuple(map(row, rows))
    except (*UNREADABLE, ValueError, OSError, EOFError, zlib.error) as exc:
        raise FormatError(f"not a {kind} file: {exc}") from exc
    except ConfigError as exc:
        raise FormatError(f"not a {kind} file: {exc.message}") from exc


def load(path: Path, decode: Callable[[bytes], T]) -> T:
    """FormatError begins with the path."""
    try:
        return decode(path.read_bytes())
    except OSError as exc:
        raise FormatError(f"{path}: {exc.strerror}") from exc
    except FormatError as exc:
        raise FormatError(f"{path}: {exc.message}") from exc


def check_writable(path: Path) -> None:
    """FormatError where `write_whole` could not write: before what takes long. Makes the folder; the file stays."""
    _written(path, None)


def write_whole(path: Path, data: bytes) -> None:
    """The file is complete, or as it was before. FormatError where it cannot be written; nothing is left behind.

    A link stays one. A device or a pipe is written to: it is no file that another one may replace.
    """
    _written(path, data)


def _written(path: Path, data: bytes | None) -> None:
    beside = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not target.is_file():
            if data is not None:
                target.write_bytes(data)
            return
        beside = target.with_name(f".{target.name}.{os.getpid()}.part")
        with beside.open("wb") as file:
            file.write(data or b"")
            file.flush()
            os.fsync(file.fileno())
        if data is None:
            beside.unlink()
        else:
            beside.replace(target)
    except OSError as exc:
        with suppress(OSError):
            if beside is not None:
                beside.unlink()
        raise FormatError(f"{path}: cannot be written: {exc.strerror}") from exc
