"""Patches three parts of vLLM that cost too much when several engines share few cores. vLLM has no flags for them.

* NIXL's progress thread polls UCX without a pause. The agent's config has a delay for it, which vLLM leaves at 0.
* The reader of vLLM's shared-memory queue spins for a second after every message before it starts to yield.
* On CPUs vLLM starts its engine core by `spawn`, which imports everything again: more than half of a start.

On a machine with many cores the first two are useful: they save microseconds. vLLM calls `register` in every process of
an engine, so it may run twice. The settings come from the environment: `PPD_NIXL_POLL_US` (500), `PPD_QUEUE_SPIN_S`
(0.002) and `PPD_FORK_CORE` (1 to fork).
"""

from __future__ import annotations

import importlib
import os
from typing import Any


def register() -> None:
    slow_nixl_polling(int(os.environ.get("PPD_NIXL_POLL_US", "500")))
    shorten_queue_spin(float(os.environ.get("PPD_QUEUE_SPIN_S", "0.002")))
    if os.environ.get("PPD_FORK_CORE") == "1":
        fork_engine_core()


def slow_nixl_polling(delay_us: int) -> None:
    """Every NIXL agent created from now on sleeps `delay_us` between two polls."""
    try:
        bindings: Any = importlib.import_module("nixl._api").nixlBind
    except ImportError:  # a replica needs no NIXL
        return
    create = bindings.nixlAgent
    if getattr(create, "polls_slowly", False):
        return

    def create_slow(name: str, config: Any) -> Any:
        config.pthrDelay = delay_us
        return create(name, config)

    create_slow.polls_slowly = True  # type: ignore[attr-defined]
    bindings.nixlAgent = create_slow


def shorten_queue_spin(seconds: float) -> None:
    try:
        condition: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast").SpinCondition
    except (ImportError, AttributeError):
        return
    condition.__init__.__defaults__ = (seconds,)


def fork_engine_core() -> None:
    """Restores `fork`, vLLM's default elsewhere, after the CPU platform has chosen `spawn`.

    It chooses `spawn` because a fork must not inherit OpenMP's threads; with OMP_NUM_THREADS=1 there are none.
    """
    try:
        platform: Any = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    except (ImportError, AttributeError):
        return
    check = platform.check_and_update_config.__func__
    if getattr(check, "forks_core", False):
        return

    def check_and_fork(cls: Any, config: Any) -> None:
        check(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    check_and_fork.forks_core = True  # type: ignore[attr-defined]
    platform.check_and_update_config = classmethod(check_and_fork)
