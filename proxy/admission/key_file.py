"""The keys in force: read from the key file at the start, and again whenever it changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from ..errors import ConfigError
from ..runtime.watched_files import WatchedFiles
from .keys import Client, Keys, decode, scoped

log = logging.getLogger(__name__)


class KeyRing:
    """A file is used as a whole or not at all. A removed key opens nothing from then on; running turns finish."""

    def __init__(self, file: Path, admin_key: str = "", share_prefixes: Collection[str] = ()) -> None:
        """ConfigError if the file cannot be used, or a client's key in it is the admin key.

        share_prefixes: tenants that share cached prompts.
        """
        self._file = file
        self._share_prefixes = share_prefixes
        self._admin_key = admin_key
        self._watched = WatchedFiles(file)
        self._keys = self._load()

    def find(self, key: str) -> Client | None:
        return self._keys.find(key)

    def look(self) -> bool | None:
        """Reloads the file if it has changed and is no longer being written; None if not."""
        return self.reload(self._watched.have_rested) if self._watched.are_new() else None

    def reload(self, may_remove: Callable[[], bool] = lambda: True) -> bool | None:
        """False, logged and with nothing changed, if the file cannot be used; None, if no key may be removed yet.

        A file that is cut between two keys can be used too.
        """
        try:
            keys = self._load()
        except ConfigError as exc:
            log.error("the changed keys are not used: %s", exc)
            return False
        before = {entry.client.name: entry for entry in self._keys.entries}
        after = {entry.client.name: entry for entry in keys.entries}
        if before.keys() - after.keys() and not may_remove():
            return None
        changed = sorted(name for name in before.keys() & after.keys() if before[name] != after[name])
        log.info(
            "keys: %d in force; added: %s; removed: %s; changed: %s",
            len(after),
            ", ".join(sorted(after.keys() - before.keys())) or "none",
            ", ".join(sorted(before.keys() - after.keys())) or "none",
            ", ".join(changed) or "none",
        )
        self._keys = keys
        return True

    def _load(self) -> Keys:
        keys = load(self._file)
        if keys.is_blank:  # as an editor or a full disk may leave it; a key is revoked by a file that is meant
            raise ConfigError(f"{self._file}: holds no key; write `key = []` if that is meant", param="keys_file")
        keys = scoped(keys, self._share_prefixes)
        holder = keys.find(self._admin_key) if self._admin_key else None
        if holder is not None:
            raise ConfigError(f"{self._file}: key {holder.name!r}: must differ from admin_key", param="keys_file")
        return keys


def load(file: Path) -> Keys:
    try:
        data = file.read_bytes()
    except OSError as exc:
        raise ConfigError(f"{file}: must be a readable key file ({exc.strerror})", param="keys_file") from exc
    return decode(data, str(file))
