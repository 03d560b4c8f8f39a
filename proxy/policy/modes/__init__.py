"""The modes: each says which route a turn should take, as far as nothing forbids it.

A mode is a function of the turn, of who may take it, and of the operator's rules. `decide` calls it for turns whose
route is still open, and then carries out what the fleet allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...config import Mode
from ..candidates import Candidates
from ..decision import Preference, Rules, Turn
from .fixed import always_local, always_split, fraction
from .placed import by_free_kv, by_hash
from .predicted import least_ttft, lmetric, slack, weights
from .profiles import by_profiles
from .slo import slo
from .table import by_table
from .thresholds import conditional, isl_bounding, isl_or_load, prefill_load, prefix_threshold

Strategy = Callable[[Turn, Candidates, Rules], Preference]
"""ValueError never, whatever it is given; there is a D among the candidates, or in a mode of `PLACING` an R."""

STRATEGIES: Mapping[Mode, Strategy] = {
    Mode.TABLE: by_table,
    Mode.ALWAYS_LOCAL: always_local,
    Mode.SESSION_HASH: by_hash,
    Mode.FREE_KV: by_free_kv,
    Mode.ALWAYS_SPLIT: always_split,
    Mode.FRACTION: fraction,
    Mode.REPLICA: by_table,  # for turns that no replica can take
    Mode.PREFIX_THRESHOLD: prefix_threshold,
    Mode.ISL_BOUNDING: isl_bounding,
    Mode.PREFILL_LOAD: prefill_load,
    Mode.ISL_OR_LOAD: isl_or_load,
    Mode.CONDITIONAL: conditional,
    Mode.SLO: slo,
    Mode.WEIGHTS: weights,
    Mode.LEAST_TTFT: least_ttft,
    Mode.LMETRIC: lmetric,
    Mode.SLACK: slack,
    Mode.PROFILES: by_profiles,
}

PREDICTING = frozenset({Mode.SLO, Mode.WEIGHTS, Mode.LEAST_TTFT, Mode.LMETRIC, Mode.SLACK})
"""Those that judge each way to serve a turn by the laws."""

PLACING = PREDICTING | {Mode.SESSION_HASH, Mode.FREE_KV, Mode.PROFILES}
"""Those that choose the workers too, replicas among them."""

__all__ = ["PLACING", "PREDICTING", "STRATEGIES", "Strategy"]
