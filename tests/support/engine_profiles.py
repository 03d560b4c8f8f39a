"""An engine profile for tests: an H100 as the timing law has it by default, with changes."""

from __future__ import annotations

from typing import Any

from ppd.servers.engine_profile.profile_file import ProfileFile, Status, Transfers
from ppd.servers.engine_profile.step_time import EngineProfile


def profile_of(**changes: Any) -> ProfileFile:
    usual: dict[str, Any] = {
        "name": "test",
        "status": Status.MODELLED,
        "model": "m",
        "gpu": "H100",
        "gpu_count": 1,
        "engine": "vllm 0.13",
        "source": "a test",
        "note": "",
        "licence": "Apache-2.0",
        "costs": EngineProfile(),
        "kv_capacity_tokens": 400_000,
        "transfers": Transfers.MISSING,
        "network": "NVLink",
    }
    return ProfileFile(**(usual | changes))
