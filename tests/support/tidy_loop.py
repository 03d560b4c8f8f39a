"""The event loop of tests, which leaves no connection behind."""

from __future__ import annotations

import asyncio


class TidyLoop(asyncio.SelectorEventLoop):
    """When a test is over, one end of a connection may not have heard yet what the other end did last: such a one is
    closed here. Else the collector would find it minutes later, and warn of it in whichever test runs then."""

    def close(self) -> None:
        if not self.is_closed():
            for transport in list(self._transports.values()):  # type: ignore[attr-defined]
                transport.abort()
            self.run_until_complete(asyncio.sleep(0))
        super().close()


class TidyLoops(asyncio.DefaultEventLoopPolicy):
    _loop_factory = TidyLoop
