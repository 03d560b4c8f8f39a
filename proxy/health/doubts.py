"""Failures of engines for which a URL in the request may be to blame.

vLLM 0.32 answers 500 to a URL that it cannot fetch, after 5 s where there is no such host, after minutes where the host
says nothing. So three requests of one client would open the breakers of a whole fleet.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ..errors import LegError
from ..failures import Cause, Phase

_FETCHING = (Phase.SENT, Phase.HEADERS)
_FETCHED = re.compile(rb"(?i)(?:https?|file):|\\u")  # the scheme of a URL, or an escape that may hide one


def may_name_urls(body: bytes | memoryview) -> bool:
    """Of a request whose JSON is not read further."""
    return _FETCHED.search(body) is not None


class Doubts:
    """Of one request: they count against their workers once another one has answered it, as then the URL is good.

    From then on nothing is held: a sidecar may tell of a P's failure only when D's answer has ended.
    """

    def __init__(self, has_urls: bool) -> None:
        self._has_urls = has_urls
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
        held, self._held, self._has_urls = self._held, [], False
        for count in held:
            count()


NO_DOUBTS = Doubts(False)
"""Of all turns without media: it holds nothing."""
