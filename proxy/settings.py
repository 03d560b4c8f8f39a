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
    """Where a config came from, to read it again; flags stay on top of the file."""

    path: Path
    flags: Mapping[str, object]


class Settings:
    """The one holder of the config. A change is checked whole before it is taken; a bad file changes nothing."""

    def __init__(self, config: ProxyConfig, source: ConfigSource | None = None) -> None:
        self.config = config
        self.static_workers = static_workers(config)
        self.added: set[WorkerId] = set()  # static workers of the admin API, not of the file
        self._source = source
        self._in_file = config  # as the file said last: only what it changes is taken over what the admin API set
        self._rules = _rules(config)
        self._seen = stamp(source.path) if source else None

    def rules(self) -> Rules:
        return self._rules

    def change(self, **live: object) -> None:
        """Takes live keys; ConfigError, and nothing changed, if one is not allowed."""
        self._take(replace(self.config, **live))  # type: ignore[arg-type]

    async def watch(self, reloaded: Callable[[bool], None], every_s: float = WATCH_EVERY_S) -> None:
        """Rereads the file when it changes, until cancelled, and says whether it could be taken."""
        if self._source is None:
            return
        while True:
            await asyncio.sleep(every_s)
            if self._is_new():
                reloaded(self.reload())

    def catch_up(self) -> None:
        """Rereads the file if it has changed since it was read."""
        if self._source is not None and self._is_new():
            self.reload()

    def _is_new(self) -> bool:
        assert self._source is not None, "only a file is watched"
        before, self._seen = self._seen, stamp(self._source.path)
        return self._seen is not None and self._seen != before

    def reload(self) -> bool:
        """The file's live keys; False, logged and nothing changed, where it can't be used."""
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
