"""One running proxy and the fleet behind it: looks at it, measures a run on it, and says whether it survived.

Caches are not flushed between runs: the load generator makes new prompts each time, so that no run finds another's KV;
what is left of that is evicted as on any busy fleet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from ppd.proxy.errors import ConfigError, PPDError

from ..experiment.records import Origin, Outcome, Record, RunResult, in_order
from ..experiment.run import Run
from ..load.client import cause
from ..load.measure import measure
from ..load.target import Target
from ..sweep.backend import FleetLost
from ..sweep.loop import utc_now
from .fleet_view import FleetView, is_same

TIMEOUT_S = 10.0  # of one request to the admin API


class FleetUnreachable(PPDError): ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    health_s: float = 300.0  # for a fleet to become healthy again
    grace_s: float = 10.0  # that a worker may be missing: a busy one misses probes
    look_s: float = 2.0  # between two requests to the proxy
    failures: float = 0.5  # share of a run's requests that may fail before the run counts as failed


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFleet:
    """`origin`: what the fleet does not say of itself. `trace`: arrival times in s."""

    target: Target
    origin: Origin
    limits: RunLimits = field(default_factory=RunLimits)
    trace: Sequence[float] | None = None

    async def look(self) -> FleetView:
        """ConfigError where the admin key is not accepted; FleetUnreachable where the proxy does not answer."""
        url = self.target.url
        headers = {"X-Admin-Key": self.target.admin_key}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), headers=headers) as session,
                session.get(f"{url}/admin/workers") as response,
            ):
                body, status = await response.read(), response.status
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
            raise FleetUnreachable(f"{url} does not answer ({cause(exc)})") from exc
        if status == 200:
            return FleetView.decode(body)
        wrong = {401: "does not take the admin key", 404: "has no admin API: start it with an admin key"}
        if status in wrong:
            raise ConfigError(f"{url} {wrong[status]}")
        raise FleetUnreachable(f"{url} answered {status} to /admin/workers")

    async def check_forcing(self) -> None:
        """ConfigError unless the proxy obeys the header that forces a route: it must refuse an unknown route."""
        url = self.target.url
        headers = self.target.headers() | {"X-PPD-Force-Route": "NOWHERE", "X-Admin-Key": self.target.admin_key}
        body = {"model": self.target.model, "prompt": "x", "max_tokens": 1}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), headers=headers) as session,
                session.post(f"{url}{self.target.api.path}", json=body) as response,
            ):
                if response.status == 400 and b"X-PPD-Force-Route" in await response.read():
                    return
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise FleetUnreachable(f"{url} does not answer ({cause(exc)})") from exc
        raise ConfigError(f"{url} does not heed X-PPD-Force-Route, without which no arm can be measured")

    def seen(self, view: FleetView) -> Origin:
        known = {name: getattr(self.origin, name) for name in Origin.__struct_fields__}
        return Origin(**known | {"engine": view.engine, "model": self.target.model, "connector": view.connector})

    async def healthy(self, topology: str) -> FleetView:
        """Returns when the fleet has this topology and all of it is up and idle; FleetLost after the limit."""
        deadline_s = time.monotonic() + self.limits.health_s
        while True:
            try:
                view = await self.look()
                if view.is_ready and is_same(view.topology, topology):
                    return view
                what = f"it is {view.topology or 'without workers'}{'' if view.is_idle else ', busy'}"
            except FleetUnreachable as exc:
                what = exc.message
            if time.monotonic() >= deadline_s:
                raise FleetLost(f"not a healthy, idle {topology} for {self.limits.health_s:g} s: {what}")
            await asyncio.sleep(self.limits.look_s)

    async def measure(self, run: Run, records: list[Record] | None = None) -> RunResult:
        """A failed result if the fleet was damaged during the run; FleetLost if it was not healthy before.

        `records` is filled as answers end, for a caller that may cancel this.
        """
        records = [] if records is None else records
        before = await self.healthy(run.topology)
        started, began_s = utc_now(), time.monotonic()
        reason = await self._watched(run, before, records)
        reason = reason or await self._damaged(before) or too_many_failures(records, self.limits.failures)
        return RunResult(
            run=run,
            outcome=Outcome.FAILED if reason else Outcome.FINISHED,
            origin=self.seen(before),
            started=started,
            wall_s=time.monotonic() - began_s,
            records=in_order(records),
            reason=reason,
        )

    async def _watched(self, run: Run, before: FleetView, records: list[Record]) -> str:
        # The fleet is watched meanwhile: requests to a dead one would wait for hours.
        measuring = asyncio.ensure_future(measure(run, self.target, self.trace, record=records.append))
        watching = asyncio.ensure_future(self._until_damaged(before))
        try:
            await asyncio.wait({measuring, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not measuring.done():
                return watching.result()
            measuring.result()
            return ""
        except PPDError as exc:
            return exc.message
        finally:
            for task in (measuring, watching):
                task.cancel()
            await asyncio.gather(measuring, watching, return_exceptions=True)

    async def _until_damaged(self, before: FleetView) -> str:
        while True:
            await asyncio.sleep(self.limits.look_s)
            if damage := await self._damaged(before):
                return damage

    async def _damaged(self, before: FleetView) -> str:
        """The damage, if it lasts longer than `grace_s`; a restart counts at once."""
        deadline_s = time.monotonic() + self.limits.grace_s
        while True:
            damage = await self._damage(before)
            if not damage or damage.endswith("restarted") or time.monotonic() >= deadline_s:
                return damage
            await asyncio.sleep(min(self.limits.look_s, self.limits.grace_s))

    async def _damage(self, before: FleetView) -> str:
        try:
            return (await self.look()).damage(before)
        except FleetUnreachable as exc:
            return exc.message


def too_many_failures(records: Sequence[Record], limit: float) -> str:
    """Why the run counts as failed; empty if at most the share `limit` of its requests failed."""
    measured = [record for record in records if record.measured]
    errors = [record.error for record in measured if record.error]
    if not errors or len(errors) <= limit * len(measured):
        return ""
    return f"{len(errors)} of {len(measured)} requests failed, the first with: {errors[0]}"
