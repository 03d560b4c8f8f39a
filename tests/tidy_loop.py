"""Event loops of tests: what is still open when a test is over is closed with its loop.

Else the collector would find it minutes later, and warn of it in whichever test runs then.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any


class TidyLoop(asyncio.SelectorEventLoop):
    """asyncio itself forgets a connection that a port has taken just before it closes, or before the loop ends. And
    when a test is over, one end of a connection may not have heard yet what the other end did last.
    """

    def __init__(self) -> None:
        super().__init__()
        self._taken = set[socket.socket]()  # connections of which no transport is made yet

    def close(self) -> None:
        if not self.is_closed():
            for transport in list(self._transports.values()):  # type: ignore[attr-defined]
                # One that was closed with bytes unsent, which then went out, is over, but `abort` does not know it.
                if transport._loop is not None:
                    transport.abort()
            for taken in self._taken:
                taken.close()
            self.run_until_complete(asyncio.sleep(0))
        super().close()

    def _accept_connection2(
        self, make: Any, taken: socket.socket, extra: Any, tls: Any, server: Any, *limits: Any
    ) -> Coroutine[Any, Any, None]:
        self._taken.add(taken)  # a task that is cancelled before it runs never comes to what follows
        accepting = super()._accept_connection2  # type: ignore[misc]

        async def accept() -> None:
            self._taken.discard(taken)
            if server is not None and not server.sockets:  # closed meanwhile
                taken.close()
            else:
                await accepting(make, taken, extra, tls, server, *limits)

        return accept()


class TidyLoops(asyncio.DefaultEventLoopPolicy):
    _loop_factory = TidyLoop


@contextmanager
def unheard() -> Iterator[list[str]]:
    """What the collector warns of, which pytest would hold against the test that runs."""
    said, before = list[str](), sys.unraisablehook
    sys.unraisablehook = lambda given: said.append(str(given.exc_value))
    try:
        gc.collect()
        said.clear()
        yield said
        gc.collect()
    finally:
        sys.unraisablehook = before
