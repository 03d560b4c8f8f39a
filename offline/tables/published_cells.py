"""The published rows as cells, for reports and calibration. `x` is 0 where every turn went through P, 1 where every
later turn went to its D, None for replicas and where D differ (`1P_1D_2pD`).

The rows hold means, medians and 99th percentiles only, so an estimate has no spread.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ppd.proxy.decision_table.prototype_format import WORKLOADS
from ppd.proxy.errors import ConfigError, FormatError
from ppd.servers.fleet.topology import Topology

from ..experiment.cells import MeasuredCell
from ..experiment.files import load
from ..experiment.run import Profile, Workload
from ..experiment.statistics import Estimate
from .published_rows import PublishedRow, read_rows

SECONDS: Final = 10.0  # of arrivals a run
CONNECTIONS: Final = 50  # that the published client opened at most
# Its prompts have one of three formats, by chance. The prototype takes a conversation for another one if turn 1 had a
# format without "User:" and turn 2 has the one with it.
UNRECOGNISED: Final = 2 / 3 * 1 / 3

FIRST: Final = {
    name: Profile(name=name, new_tokens=n, output_tokens=n) for name, n in (("small", 128), ("large", 1024))
}
LATER: Final = {
    one.name: Profile(name=one.name, new_tokens=one.new_tokens, output_tokens=one.output_tokens) for one in WORKLOADS
}
_FIRST_TURN = ("t1_ttft_avg", "t1_ttft_p50", "t1_ttft_p99", "t1_tpot_avg")


def read_cells(path: Path) -> list[MeasuredCell]:
    """FormatError begins with the path and names what is missing or wrong."""
    return load(path, lambda data: [_cell(row) for row in read_rows(data, also=(*_FIRST_TURN, "tok_s"))])


def config_of(cell: MeasuredCell) -> str:
    """What the paper's code calls a topology at x: 2P_2pD is 2P_2D at x = 1. Other shares are appended: 2P_2D-x0.5."""
    if cell.x == 1.0:
        return re.sub(r"D$", "pD", cell.topology)
    return f"{cell.topology}-x{cell.x:.3g}" if cell.x else cell.topology


def _cell(row: PublishedRow) -> MeasuredCell:
    if row.context not in FIRST or row.workload not in LATER:
        raise FormatError(f"line {row.line}: workload '{row.context}_{row.workload}' is none of the published ones")
    try:
        topology, x = _topology(row.config)
    except ConfigError as exc:
        raise FormatError(f"line {row.line}: config: {exc.message}") from exc
    figures = {column: float(value) for column, value in row.figures.items()}
    n_first, n_later = int(figures["n_t1"]), int(figures["n_t2"])
    later_requests = max(row.requests // 2, n_later)
    return MeasuredCell(
        topology=topology,
        x=x,
        workload=Workload(first=FIRST[row.context], later=LATER[row.workload]),
        qps=row.qps,
        seeds=(0,),
        requests=row.requests,
        failures=row.requests - row.finished,
        later_requests=later_requests,
        later_failures=later_requests - n_later,
        ttft_s=_both(n_first, n_later, figures["t1_ttft_avg"], figures["t2_ttft_avg"]),
        tpot_s=_both(n_first, n_later, figures["t1_tpot_avg"], figures["t2_tpot_avg"]),
        first_ttft_s=_estimate(n_first, figures["t1_ttft_avg"], figures["t1_ttft_p50"], figures["t1_ttft_p99"]),
        later_ttft_s=_estimate(n_later, figures["t2_ttft_avg"], figures["t2_ttft_p50"], figures["t2_ttft_p99"]),
        later_tpot_s=_estimate(n_later, figures["t2_tpot_avg"], None, figures["t2_tpot_p99"]),
        tokens_per_s=figures["tok_s"] or None,
        failed=() if figures["success_pct"] else ("no request finished",),
    )


def _topology(config: str) -> tuple[str, float | None]:
    topology = Topology.parse(config)
    if not topology.decodes or topology.local_decodes not in (0, topology.decodes):
        return config, None  # no D, or D that differ
    return config.replace("pD", "D"), 1.0 if topology.local_decodes else 0.0


def _estimate(n: int, mean_ms: float, p50_ms: float | None, p99_ms: float) -> Estimate | None:
    # A run that recorded some zeros is no evidence.
    if not n or not mean_ms or p50_ms == 0 or not p99_ms:
        return None
    return Estimate(n, mean_ms / 1e3, None if p50_ms is None else p50_ms / 1e3, p99_ms / 1e3, None, None)


def _both(n_first: int, n_later: int, first_ms: float, later_ms: float) -> Estimate | None:
    # The rows do not hold the percentiles of both turns together.
    if not (n_first and n_later and first_ms and later_ms):
        return None
    mean_ms = (n_first * first_ms + n_later * later_ms) / (n_first + n_later)
    return Estimate(n_first + n_later, mean_ms / 1e3, None, None, None, None)
