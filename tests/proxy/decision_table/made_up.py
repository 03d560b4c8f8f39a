"""What decision tables made up by tests have in common."""

from __future__ import annotations

from ppd.proxy.decision_table.format import Arm, Provenance, Tpot, Ttft

ORIGIN = Provenance(
    model="Tiny-1B",
    gpu="GPU",
    gpu_count=2,
    engine="sim",
    engine_version="3",
    connector="none",
    date="2026-01-01",
    source="a test",
    seeds=(),
    note="made up",
    licence="Apache-2.0",
)


def arm(ttft_s: float, tpot_s: float, failures: int = 0) -> Arm:
    return Arm(
        n=10,
        failures=failures,
        ttft_s=Ttft(mean=ttft_s, p50=ttft_s, p99=2 * ttft_s, std=0.0),
        tpot_s=Tpot(mean=tpot_s, p50=None, p99=2 * tpot_s, std=None),
    )
