"""Failures of engines for which a URL in the request may be to blame.

vLLM 0.32 answers 500 to a URL that it cannot fetch, after 5 s where there is no such host, after minutes where the host
says nothing. So three requests of one client would open the breakers of a whole fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..errors import LegError
from ..failures import Cause, Phase
from ..media.items import MediaItem

_FETCHING = (Phase.SENT, Phase.HEADERS)


class Doubts:
    """Of one turn: they count against their workers once another one has answered it, as then the URL is good."""

    def __init__(self, media: Iterable[MediaItem] = ()) -> None:
        self._has_urls = any(item.is_by_url for item in media)
        self._held = list[Callable[[], object]]()

    def count(self, exc: LegError, count: Callable[[], object]) -> None:
        """Now, unless it is to be held."""
        if not self.hold(exc, count):
            count()

    def hold(self, exc: LegError, count: Callable[[], object]) -> bool:
        """Whether `count`, which holds the failure against its worker, is left until another one has answered."""
        if not self._has_urls or exc.phase not in _FETCHING or exc.cause not in (Cause.SERVER, Cause.TIMEOUT):
            return False
        self._held.append(count)
        return True

    def answered(self) -> None:
        held, self._held = self._held, []
        for count in held:
            count()


NO_DOUBTS = Doubts()
"""Of all turns without media: it holds nothing."""
