"""What would keep a proxy from starting with a config, all at once: keys, workers, the table, keys of clients, files.

No port is opened, and nothing is written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click

from ..admission.key_file import KeyRing
from ..config import Draft, ProxyConfig, all_of, refused
from ..decision_table.score import weight_rules
from ..discovery.heartbeat_listener import curve_keys
from ..discovery.static_workers import static_workers
from ..downstream.serve import check_extra
from ..errors import ConfigErrors, PPDError
from ..laws.targets import target_rules
from ..policy.stage_order import order_rules
from ..runtime.tls import client_tls, worker_tls
from ..settings import check_mode, check_table, endpoints, profiles, schedule
from ..tokenizer.folder_names import FolderNames


def check(draft: Draft) -> ProxyConfig:
    """PPDError that tells all that is wrong."""
    errors = [*draft.errors, *problems(draft.config)]
    if errors:
        raise all_of(errors)
    return draft.config


def checked(path: Path | None) -> ProxyConfig:
    """Of a TOML file; click's own error for what is wrong in it."""
    try:
        return check(Draft.read(path, {}))
    except PPDError as exc:
        raise click.ClickException(exc.in_lines() if isinstance(exc, ConfigErrors) else exc.message) from exc


def problems(config: ProxyConfig, parts: Iterable[Callable[[ProxyConfig], object]] = ()) -> Iterator[PPDError]:
    """Of `PARTS`, or of some. The table is loaded in every mode, as the admin API may choose the one that needs it."""
    for part in parts or PARTS:
        yield from _raised(part, config)


def _raised(part: Callable[[ProxyConfig], object], config: ProxyConfig) -> Iterator[PPDError]:
    try:
        part(config)
    except PPDError as exc:
        yield exc


def check_config_table(config: ProxyConfig) -> None:
    check_table(config.table)


def _profiles(config: ProxyConfig) -> None:
    try:
        workers = static_workers(config)
    except PPDError:  # told already
        workers = ()
    profiles(config, workers)


def _schedule(config: ProxyConfig) -> None:
    endpoints(schedule(config))


def _mode(config: ProxyConfig) -> None:
    try:
        plugins = schedule(config)
    except PPDError:  # told already
        return
    check_mode(config, plugins)


def _client_keys(config: ProxyConfig) -> None:
    if config.keys_file:
        KeyRing(Path(config.keys_file), config.admin_key)


def check_curve_keys(config: ProxyConfig) -> None:
    if config.curve_port:
        curve_keys(config)


def _tokenizer(config: ProxyConfig) -> None:
    if config.tokenizer:
        FolderNames(config.tokenizer)


def _receipt_log(config: ProxyConfig) -> None:
    if not config.receipt_log:
        return
    file, is_usable = Path(config.receipt_log), False
    with contextlib.suppress(OSError):  # of a name that no file can have, or in a folder that is closed
        is_usable = os.access(file if file.exists() else file.parent, os.W_OK) and not file.is_dir()
    if not is_usable:
        raise refused("receipt_log", config.receipt_log, "a file that can be written")


def _picker(config: ProxyConfig) -> None:
    if config.picker_port:
        check_extra()


PARTS: tuple[Callable[[ProxyConfig], object], ...] = (
    static_workers,
    weight_rules,
    target_rules,
    order_rules,
    check_config_table,
    _profiles,
    _schedule,
    _mode,
    _client_keys,
    client_tls,
    worker_tls,
    check_curve_keys,
    _receipt_log,
    _tokenizer,
    _picker,
)
