"""Warnings of what does not answer: the engine, or a proxy. Soon, again while it lasts, and once when it is over."""

from __future__ import annotations

import asyncio
import errno
import logging
import time

import aiohttp

log = logging.getLogger(__name__)

REMIND_S = 60.0
ENGINE_AFTER_S = 3.5  # a busy engine may be slower than the timeout once
TICK_S = 0.25
_ASK_EVERY_S = 1.0
_ASK_TIMEOUT_S = 2.0


class Silence:
    """When to warn: after `after_s` without a sign of life, and every REMIND_S from then on. Times are monotonic."""

    def __init__(self, after_s: float, now_s: float) -> None:
        self._after_s = after_s
        self._warn_at_s = now_s + after_s
        self._has_warned = False

    def heard(self, now_s: float) -> bool:
        """A sign of life; True if a warning had been given."""
        was_warned, self._has_warned = self._has_warned, False
        self._warn_at_s = now_s + self._after_s
        return was_warned

    def is_due(self, now_s: float) -> bool:
        """Whether to warn now; the next time is then REMIND_S later."""
        if now_s < self._warn_at_s:
            return False
        self._has_warned = True
        self._warn_at_s = now_s + REMIND_S
        return True

    def again_by(self, at_s: float) -> None:
        """There is more to say, no later than then."""
        self._warn_at_s = min(self._warn_at_s, at_s)


class EngineSilence:
    """Asks the engine's /health each second, beside the agent's probes, which are further apart."""

    def __init__(self, base_url: str, hint: str = "", *, after_s: float = ENGINE_AFTER_S) -> None:
        """hint: what else to say of an engine that does not answer."""
        self._base_url = base_url
        self._hint = hint
        self._after_s = after_s
        self._why = f"no answer within {_ASK_TIMEOUT_S:g} s"

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Runs until it is cancelled."""
        silence = Silence(self._after_s, time.monotonic())
        asking = asyncio.ensure_future(self._ask(session))
        try:
            while True:
                await asyncio.wait({asking}, timeout=TICK_S)
                if asking.done():
                    if asking.result() and silence.heard(time.monotonic()):
                        log.info("engine %s answers again", self._base_url)
                    asking = asyncio.ensure_future(self._ask(session, pause_s=_ASK_EVERY_S))
                if silence.is_due(time.monotonic()):
                    log.warning("engine %s does not answer: %s%s", self._base_url, self._why, self._hint)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _ask(self, session: aiohttp.ClientSession, pause_s: float = 0.0) -> bool:
        await asyncio.sleep(pause_s)
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S), session.get(f"{self._base_url}/health") as response:
                self._why = f"its /health says {response.status}"
                return response.status == 200
        except TimeoutError:
            self._why = f"no answer within {_ASK_TIMEOUT_S:g} s"
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as exc:
            refused = isinstance(exc, OSError) and exc.errno == errno.ECONNREFUSED
            self._why = "nothing listens there" if refused else "it can't be reached"
        except (aiohttp.ClientError, OSError, ValueError):
            self._why = "another kind of port: it does not speak HTTP"
        return False
