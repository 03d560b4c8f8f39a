"""Which engine profile each worker has: its own where the config or its agent names one, else the config's."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ..config import all_of
from ..errors import ConfigError, FormatError, PPDError
from ..fleet.worker import Source, Worker
from .profile_file import ProfileFile, bundled, find, with_cap

log = logging.getLogger(__name__)

REFUSED_KEPT = 64  # names that agents announced and nothing knows: each is logged once, as far as they are kept


class Profiles:
    """Each file is read once. Agents name profiles that are bundled, or that the config reads: never a path."""

    def __init__(self, usual: str = "", of_workers: Iterable[str] = (), *, long_prefill_tokens: int = 0) -> None:
        """usual: of workers without a profile of their own; empty: none. of_workers: that the config names for some.
        long_prefill_tokens: where a profile says nothing of it.

        ConfigError tells each that is not found or damaged.
        """
        self._long_prefill_tokens = long_prefill_tokens
        self._read: dict[str, ProfileFile] = {}  # by the name or path that the config gives
        self._refused: set[str] = set()
        self._bundled = frozenset(bundled())
        errors: list[PPDError] = []
        wanted = [("profile", usual), *(("workers", name) for name in sorted(set(of_workers)))]
        for key, name in wanted:
            try:
                self._add(name, key)
            except ConfigError as exc:
                errors.append(exc)
        if errors:
            raise all_of(errors)
        self._usual = self._read.get(usual)

    def of(self, worker: Worker) -> ProfileFile | None:
        """None where none is known."""
        if not worker.profile:
            return self._usual
        own = self._static(worker.profile) if worker.source is Source.STATIC else self._announced(worker.profile)
        return own or self._usual

    def is_in(self, other: Profiles) -> bool:
        """Whether the other gives every worker the same profile as this one."""
        return self._usual == other._usual and self._read.items() <= other._read.items()

    def add(self, name: str) -> None:
        """Of a static worker that is about to be added. ConfigError if it is not found or damaged."""
        self._add(name, "workers")

    def _add(self, name: str, key: str) -> None:
        if not name or name in self._read:
            return
        try:
            self._read[name] = with_cap(find(name), self._long_prefill_tokens)
        except FormatError as exc:
            raise ConfigError(f"{key}: profile = {name!r}: must be a profile file ({exc.message})", param=key) from exc
        except ConfigError as exc:
            raise exc if key == "profile" else ConfigError(f"{key}: {exc.message}", param=key) from exc

    def _static(self, name: str) -> ProfileFile | None:
        if name not in self._read and name not in self._refused:
            try:
                self._add(name, "workers")  # another process of this proxy has taken it
            except ConfigError as exc:
                self._refuse(name, exc.message)
        return self._read.get(name)

    def _announced(self, name: str) -> ProfileFile | None:
        if name in self._bundled:
            return self._static(name)
        known = next((one for one in self._read.values() if one.name == name), None)
        if known is None and name not in self._refused:
            self._refuse(name, f"an agent announces profile {name!r}, which is neither bundled nor in the config")
        return known

    def _refuse(self, name: str, why: str) -> None:
        if len(self._refused) < REFUSED_KEPT:
            self._refused.add(name)
            log.warning("%s: its workers use the config's profile", why)
