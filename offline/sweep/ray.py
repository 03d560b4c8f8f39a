"""Slots on a Ray cluster: tasks for runs that need nothing kept, actors for fleets. Ray is imported on first use."""

from __future__ import annotations

import logging
import socket
from concurrent.futures import Future
from typing import Any

from ppd.proxy.errors import ConfigError

from ..experiment.records import RunResult
from ..experiment.run import Run
from .backend import StationPlan, Survey
from .processes import Slot

CONNECT_S = 5.0


class Ray:
    """The cluster that slots are put on; ConfigError where Ray is not installed or not to be reached."""

    def __init__(self, address: str) -> None:
        """`address`: of a cluster; "auto": the one of this machine; "local": one that is started here."""
        try:
            import ray
        except ImportError as exc:
            raise ConfigError("--ray needs Ray: pip install 'ppd-router[ray]'", param="ray") from exc
        _check_reachable(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as exc:
            hint = "where the cluster wants a token, set RAY_AUTH_MODE=token"
            raise _no_cluster(address, f"{str(exc).splitlines()[0]}; {hint}") from exc
        self._ray: Any = ray

    @property
    def cpus(self) -> int:
        return int(self._ray.cluster_resources().get("CPU", 1))

    @property
    def nodes(self) -> list[str]:
        """Ids of the cluster's machines."""
        return [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]

    def anywhere(self, plan: StationPlan) -> Slot:
        return RayTasks(self._ray, plan)

    def on(self, node: str, plan: StationPlan) -> Slot:
        return RayFleet(self._ray, plan, node)

    def close(self) -> None:
        self._ray.shutdown()


def _check_reachable(address: str) -> None:
    """ConfigError at once where nobody listens: Ray itself tries for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise _no_cluster(address, "an address is host:port")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as exc:
        raise _no_cluster(address, str(exc)) from exc


def _no_cluster(address: str, why: str) -> ConfigError:
    return ConfigError(f"ray = {address!r}: must be a cluster's address, auto or local ({why})", param="ray")


class RayTasks:
    """A slot that opens a station anew for each run, wherever the cluster has a CPU."""

    def __init__(self, ray: Any, plan: StationPlan) -> None:
        self._ray = ray
        self._plan = ray.put(plan)  # once, not with every run
        self._ask = ray.remote(num_cpus=1, max_retries=0)(_once)
        self._running: Any = None

    def survey(self, samples: tuple[Run, ...]) -> Future[Survey]:
        return self._submit("survey", samples)

    def measure(self, run: Run) -> Future[RunResult]:
        return self._submit("measure", run)

    def is_death(self, exc: BaseException) -> bool:
        return _is_death(self._ray, exc)

    def reopen(self) -> None: ...

    def abandon(self) -> None:
        self._ray.cancel(self._running, force=True)

    def close(self) -> None: ...

    def _submit(self, call: str, argument: object) -> Future[Any]:
        self._running = self._ask.remote(self._plan, call, argument)
        asked: Future[Any] = self._running.future()
        return asked


class RayFleet:
    """A slot that is an actor of one node, as a fleet has to stay from run to run."""

    def __init__(self, ray: Any, plan: StationPlan, node: str) -> None:
        self._ray = ray
        self._plan = plan
        self._node = node
        self.reopen()

    def survey(self, samples: tuple[Run, ...]) -> Future[Survey]:
        return self._submit("survey", samples)

    def measure(self, run: Run) -> Future[RunResult]:
        return self._submit("measure", run)

    def is_death(self, exc: BaseException) -> bool:
        return _is_death(self._ray, exc)

    def reopen(self) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(self._node, soft=False)
        self._actor = self._ray.remote(num_cpus=1, scheduling_strategy=there)(Kept).remote(self._plan)

    def abandon(self) -> None:
        self._ray.kill(self._actor)  # its engines end with it, see `servers.guard`

    def close(self) -> None:
        try:
            self._ray.get(self._actor.ask.remote("close"))
        except self._ray.exceptions.RayActorError:  # killed, or died by itself
            return
        self._ray.kill(self._actor)

    def _submit(self, call: str, argument: object) -> Future[Any]:
        asked: Future[Any] = self._actor.ask.remote(call, argument).future()
        return asked


class Kept:
    """A station as an actor."""

    def __init__(self, plan: StationPlan) -> None:
        self._station = plan.open()

    def ask(self, call: str, *arguments: object) -> object:
        return getattr(self._station, call)(*arguments)


def _once(plan: StationPlan, call: str, argument: object) -> object:
    return Kept(plan).ask(call, argument)


def _is_death(ray: Any, exc: BaseException) -> bool:
    """Ray's own errors, but for that of a call which has raised one itself."""
    errors = ray.exceptions
    return isinstance(exc, errors.RaySystemError) or (
        isinstance(exc, errors.RayError) and not isinstance(exc, errors.RayTaskError)
    )
