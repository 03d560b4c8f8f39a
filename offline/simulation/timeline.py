"""Virtual time: events in the order of their times. Events at one time run in the order in which they were added."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Timeline:
    """`now_s` starts at 0 and never goes back."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, time_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """A time that has passed means now, after what is already due."""
        self._asked += 1
        heapq.heappush(self._agenda, (max(time_s, self.now_s), self._asked, action, arguments))

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now_s + delay_s, action, *arguments)

    def run(self, until: Callable[[], bool]) -> None:
        """Ends when the condition holds, which is asked after each event, or when no event is left."""
        agenda = self._agenda
        while agenda and not until():
            self.now_s, _, action, arguments = heapq.heappop(agenda)
            action(*arguments)
