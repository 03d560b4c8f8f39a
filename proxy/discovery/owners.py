"""Which key speaks for a worker on the encrypted port: the one that announced it first, while it goes on doing so."""

from __future__ import annotations

from collections.abc import Callable

from ..fleet.worker import WorkerId


class Owners:
    """Keys by worker. `now` is a monotonic clock in seconds; a key that is silent for `ttl_s` has lost its worker."""

    def __init__(self, ttl_s: float, now: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._now = now
        self._owners: dict[WorkerId, tuple[str, float]] = {}

    def may_speak(self, worker_id: WorkerId, key: str) -> bool:
        """Whether this key may announce this worker; if so it is the owner from now on."""
        now_s = self._now()
        for known, (_, heard_s) in tuple(self._owners.items()):
            if now_s - heard_s <= self._ttl_s:
                break  # the others were heard later
            del self._owners[known]
        if self._owners.get(worker_id, (key, now_s))[0] != key:
            return False
        self._owners.pop(worker_id, None)
        self._owners[worker_id] = (key, now_s)
        return True

    def release(self, worker_id: WorkerId) -> None:
        """Its owner has taken it back: the next one to announce it has it."""
        self._owners.pop(worker_id, None)
