"""The rows that were published with the PPD paper, as cells: one run a configuration, workload and QPS.

`xP_yD` sent every turn through P (x = 0), `xP_ypD` every later turn to its D (x = 1); `4R` are replicas. Times are in
ms there, and only means, medians and 99th percentiles are known, so an estimate has no spread. A zero is the mark of a
figure that is missing. The columns are described in tables/README.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pandas as pd

from ppd.proxy.decision_table.prototype_format import WORKLOADS
from ppd.proxy.errors import FormatError

from ..experiment.cells import MeasuredCell
from ..experiment.run import Profile, Workload
from ..experiment.statistics import Estimate

SECONDS: Final = 10.0  # of arrivals a run
CONNECTIONS: Final = 50  # that the published client opened at most

FIRST: Final = {
    name: Profile(name=name, new_tokens=n, output_tokens=n) for name, n in (("small", 128), ("large", 1024))
}
LATER: Final = {
    one.name: Profile(name=one.name, new_tokens=one.new_tokens, output_tokens=one.output_tokens) for one in WORKLOADS
}

_TTFTS = ("t1_ttft_avg", "t1_ttft_p50", "t1_ttft_p99", "t2_ttft_avg", "t2_ttft_p50", "t2_ttft_p99")
_COLUMNS = (
    "config",
    "workload",
    "qps",
    "n_t1",
    "n_t2",
    *_TTFTS,
    "t1_tpot_avg",
    "t2_tpot_avg",
    "t2_tpot_p99",
    "tok_s",
    "success_pct",
)


def read(path: Path) -> list[MeasuredCell]:
    """The cells of a published grid, CSV, gzipped or not; FormatError names what is missing or wrong."""
    try:
        rows = pd.read_csv(path, dtype={"config": str, "workload": str})
    except (OSError, ValueError, UnicodeDecodeError) as exc:
        raise FormatError(f"{path}: not the rows of a published grid: {exc}") from exc
    missing = [column for column in _COLUMNS if column not in rows.columns]
    if missing:
        raise FormatError(f"{path}: column {missing[0]} is missing")
    return [_cell(path, line, row) for line, row in enumerate(rows.to_dict("records"), start=2)]


def config_of(cell: MeasuredCell) -> str:
    """What the paper's code calls a topology at x: 2P_2pD is 2P_2D at x = 1; shares between come behind, as -x0.5."""
    if cell.x == 1.0:
        return re.sub(r"D$", "pD", cell.topology)
    return f"{cell.topology}-x{cell.x:.3g}" if cell.x else cell.topology


def _cell(path: Path, line: int, row: dict[Any, Any]) -> MeasuredCell:
    topology, x = _topology(row["config"])
    first, _, later = str(row["workload"]).partition("_")
    if first not in FIRST or later not in LATER:
        raise FormatError(f"{path}, line {line}: workload {row['workload']!r} is none of the published ones")
    n_first, n_later = int(row["n_t1"]), int(row["n_t2"])
    share = float(row["success_pct"]) / 100
    finished = n_first + n_later
    requests = max(round(finished / share), finished) if share else max(finished, 1)
    return MeasuredCell(
        topology=topology,
        x=x,
        workload=Workload(first=FIRST[first], later=LATER[later]),
        qps=float(row["qps"]),
        seeds=(0,),
        requests=requests,
        failures=requests - finished,
        later_requests=max(requests // 2, n_later),
        later_failures=max(requests // 2, n_later) - n_later,
        ttft_s=_both(n_first, n_later, row["t1_ttft_avg"], row["t2_ttft_avg"]),
        tpot_s=_both(n_first, n_later, row["t1_tpot_avg"], row["t2_tpot_avg"]),
        first_ttft_s=_estimate(n_first, row["t1_ttft_avg"], row["t1_ttft_p50"], row["t1_ttft_p99"]),
        later_ttft_s=_estimate(n_later, row["t2_ttft_avg"], row["t2_ttft_p50"], row["t2_ttft_p99"]),
        later_tpot_s=_estimate(n_later, row["t2_tpot_avg"], None, row["t2_tpot_p99"]),
        tokens_per_s=float(row["tok_s"]) or None,
        failed=() if share else ("no request finished",),
    )


def _topology(config: str) -> tuple[str, float | None]:
    if "D" not in config:
        return config, None
    return config.replace("pD", "D"), 1.0 if "pD" in config else 0.0


def _estimate(n: int, mean_ms: float, p50_ms: float | None, p99_ms: float) -> Estimate | None:
    """None where any figure is missing: a run that recorded some zeros is no evidence."""
    if not n or not mean_ms or p50_ms == 0 or not p99_ms:
        return None
    return Estimate(n, mean_ms / 1e3, None if p50_ms is None else p50_ms / 1e3, p99_ms / 1e3, None, None)


def _both(n_first: int, n_later: int, first_ms: float, later_ms: float) -> Estimate | None:
    """The mean over both turns; the tails of the two together are not in the rows."""
    if not (n_first and n_later and first_ms and later_ms):
        return None
    mean_ms = (n_first * first_ms + n_later * later_ms) / (n_first + n_later)
    return Estimate(n_first + n_later, mean_ms / 1e3, None, None, None, None)
