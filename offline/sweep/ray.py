"""Executors on a Ray cluster: tasks where nothing is kept between runs, actors for fleets.

Ray is imported on first use.
"""

from __future__ import annotations

import logging
import socket
from concurrent.futures import Future
from typing import Any

from ppd.proxy.errors import ConfigError

from ..experiment.records import RunResult
from ..experiment.run import Run
from .backend import BackendPlan, Executor, Survey

CONNECT_S = 5.0
PORT_LIMIT = 65535


class Ray:
    """The cluster that executors run on; ConfigError where Ray is not installed or cannot be reached."""

    def __init__(self, address: str) -> None:
        """`address`: of a cluster; "auto": this machine's cluster; "local": a cluster that is started here."""
        try:
            import ray
        except ImportError as exc:
            raise ConfigError("--ray needs Ray: in PPD's clone, pip install '.[ray]'", param="ray") from exc
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
        return [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]

    def anywhere(self, plan: BackendPlan) -> Executor:
        return RayTaskExecutor(self._ray, plan)

    def on(self, node: str, plan: BackendPlan) -> Executor:
        return RayActorExecutor(self._ray, plan, node)

    def close(self) -> None:
        self._ray.shutdown()


def _check_reachable(address: str) -> None:
    # Ray itself would try for minutes.
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    # The C library would take a port above 65535 modulo 65536, where somebody else may listen.
    if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) <= PORT_LIMIT:
        raise _no_cluster(address, f"an address is host:port, with a port from 1 to {PORT_LIMIT}")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as exc:
        raise _no_cluster(address, str(exc)) from exc


def _no_cluster(address: str, why: str) -> ConfigError:
    return ConfigError(f"ray = {address!r}: must be a cluster's address, auto or local ({why})", param="ray")


class RayTaskExecutor:
    """Opens a backend anew for each run, wherever the cluster has a CPU."""

    def __init__(self, ray: Any, plan: BackendPlan) -> None:
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


class RayActorExecutor:
    """An actor on one node, because a fleet stays from run to run."""

    def __init__(self, ray: Any, plan: BackendPlan, node: str) -> None:
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
        self._actor = self._ray.remote(num_cpus=1, scheduling_strategy=there)(BackendActor).remote(self._plan)

    def abandon(self) -> None:
        self._ray.kill(self._actor)  # its engines end with it, see `servers.fleet.guard`

    def close(self) -> None:
        try:
            self._ray.get(self._actor.ask.remote("close"))
        except self._ray.exceptions.RayActorError:  # killed, or died by itself
            return
        self._ray.kill(self._actor)

    def _submit(self, call: str, argument: object) -> Future[Any]:
        asked: Future[Any] = self._actor.ask.remote(call, argument).future()
        return asked


class BackendActor:
    def __init__(self, plan: BackendPlan) -> None:
        self._backend = plan.open()

    def ask(self, call: str, *arguments: object) -> object:
        return getattr(self._backend, call)(*arguments)


def _once(plan: BackendPlan, call: str, argument: object) -> object:
    return BackendActor(plan).ask(call, argument)


def _is_death(ray: Any, exc: BaseException) -> bool:
    """Ray's own errors, except RayTaskError: there the call itself raised."""
    errors = ray.exceptions
    return isinstance(exc, errors.RaySystemError) or (
        isinstance(exc, errors.RayError) and not isinstance(exc, errors.RayTaskError)
    )
