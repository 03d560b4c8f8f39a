"""The settings in force: the config, changed while the proxy runs by its file or by the admin API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .config import LIVE, Mode, ProxyConfig, build, with_changes
from .decision_table.score import Weights
from .decision_table.table import DecisionTable, find
from .discovery.static_workers import static_workers
from .errors import PPDError
from .fleet.worker import WorkerId
from .policy import Rules
from .runtime.watched_files import WATCH_EVERY_S, stamp

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """Where the config came from, to reread it. Flags win over the file."""

    path: Path
    flags: Mapping[str, object]


class Settings:
    """Holds the config. A change is applied only if all of it is valid."""

    def __init__(self, config: ProxyConfig, source: ConfigSource | None = None) -> None:
        self.config = config
        self.static_workers = static_workers(config)
        self.added: set[WorkerId] = set()  # static workers added by the admin API, not by the file
        self._source = source
        self._in_file = config  # as last read: only keys that change in the file override the admin API's
        self._rules = _rules(config)
        self._seen = stamp(source.path) if source else None

    def rules(self) -> Rules:
        return self._rules

    def change(self, **live: object) -> None:
        """Sets live keys; ConfigError, with nothing changed, if a value is not allowed."""
        self._take(replace(self.config, **live))  # type: ignore[arg-type]

    async def watch(self, reloaded: Callable[[bool], None], every_s: float = WATCH_EVERY_S) -> None:
        """Rereads the file when it changes, until cancelled. reloaded: told whether the file could be used."""
        if self._source is None:
            return
        while True:
            await asyncio.sleep(every_s)
            if self._is_new():
                reloaded(self.reload())

    def catch_up(self) -> None:
        if self._source is not None and self._is_new():
            self.reload()

    def _is_new(self) -> bool:
        assert self._source is not None, "only a file is watched"
        before, self._seen = self._seen, stamp(self._source.path)
        return self._seen is not None and self._seen != before

    def reload(self) -> bool:
        """Applies the file's live keys. If it can't be used: logs, changes nothing and returns False."""
        assert self._source is not None, "only a file is watched"
        try:
            wanted = build(self._source.path, self._source.flags)
            config, waiting = with_changes(self.config, self._in_file, wanted)
            self._take(config)
            self._in_file = wanted
        except PPDError as exc:
            log.error("the changed config is not used: %s", exc)
            return False
        if waiting:
            log.warning("these keys take effect at the next start: %s", ", ".join(waiting))
        return True

    def _take(self, config: ProxyConfig) -> None:
        workers, rules = static_workers(config), _rules(config)
        changed = [name for name in sorted(LIVE) if getattr(config, name) != getattr(self.config, name)]
        if changed:
            log.info("changed: %s", ", ".join(f"{name} = {getattr(config, name)!r}" for name in changed))
        self.config, self.static_workers, self._rules = config, workers, rules


def _rules(config: ProxyConfig) -> Rules:
    scored = None
    if config.mode is Mode.TABLE:
        table, weights = DecisionTable.load(find(config.table)), Weights(config.w_ttft, config.w_tpot)
        scored = table.scored(weights, config.lookup)
    return Rules(
        mode=config.mode,
        scored=scored,
        uncovered=config.uncovered,
        x=config.x,
        worker_limit=config.max_worker_inflight,
        warm_up_s=config.warm_up_s,
    )
