"""Names of workers, such as "D2": what clients and metrics see in place of addresses."""

from __future__ import annotations

from collections import Counter, OrderedDict

from .worker import Role, Worker, WorkerId

NAMES_KEPT = 10_000


class WorkerNames:
    """A worker that returns keeps its name; the names least recently used are forgotten."""

    def __init__(self) -> None:
        self._names: OrderedDict[tuple[Role, WorkerId], str] = OrderedDict()
        self._numbers: Counter[Role] = Counter()

    def of(self, worker: Worker) -> str:
        key = (worker.role, worker.id)
        if key not in self._names:
            self._numbers[worker.role] += 1
            self._keep(key, f"{worker.role}{self._numbers[worker.role]}")
        self._names.move_to_end(key)
        return self._names[key]

    def adopt(self, role: Role, worker_id: WorkerId, name: str) -> None:
        """Continues the numbering of the process that gave the name."""
        self._keep((role, worker_id), name)
        number = name.removeprefix(role)
        self._numbers[role] = max(self._numbers[role], int(number) if number.isdecimal() else 0)

    def _keep(self, key: tuple[Role, WorkerId], name: str) -> None:
        self._names[key] = name
        if len(self._names) > NAMES_KEPT:
            self._names.popitem(last=False)
