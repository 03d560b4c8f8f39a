"""The modes of a simulated proxy, by name: those of the live one, and an oracle."""

from __future__ import annotations

from functools import lru_cache

from ppd.proxy.config import Mode
from ppd.proxy.decision_table.score import Weights
from ppd.proxy.decision_table.table import DecisionTable, ScoredTable, find
from ppd.proxy.errors import ConfigError
from ppd.proxy.laws.targets import USUAL, SloTargets
from ppd.proxy.policy import Rules
from ppd.servers.fleet.topology import Topology

from ..simulation.routing import ProxySetup

TABLE = "h100-llama-3.1-8b-{}"
TABLES = {"1P_3D": 1 / 4, "2P_2D": 1 / 2, "3P_1D": 3 / 4}  # measured fleets, by the share of P

# They choose between LOCAL and SPLIT only. On a fleet of replicas they are all one rule, that of `replica`.
OF_PAIRS = frozenset(
    {
        Mode.TABLE,
        Mode.ALWAYS_LOCAL,
        Mode.ALWAYS_SPLIT,
        Mode.FRACTION,
        Mode.PREFIX_THRESHOLD,
        Mode.ISL_BOUNDING,
        Mode.PREFILL_LOAD,
        Mode.ISL_OR_LOAD,
        Mode.CONDITIONAL,
    }
)
OF_REPLICAS = frozenset({Mode.REPLICA})
ORACLE = "oracle"  # mode `slo` that knows how long each answer will be, which no live proxy can
LIVE_ONLY = frozenset({Mode.PROFILES})  # it goes by labels and a file of plugins, which no simulated fleet has
SIMULATED = tuple(mode.value for mode in Mode if mode not in LIVE_ONLY)
NAMES = (*SIMULATED, ORACLE)


def modes_on(topology: Topology, names: tuple[str, ...] = NAMES) -> tuple[str, ...]:
    """Those of them that are rules of their own on this fleet."""
    useless = frozenset[str]()
    if not topology.decodes:
        useless |= OF_PAIRS
    if not topology.replicas:
        useless |= OF_REPLICAS
    return tuple(name for name in names if name not in useless)


def proxy_setup(
    name: str, topology: Topology, *, targets: SloTargets = USUAL, scored: ScoredTable | None = None
) -> ProxySetup:
    """scored: for mode `table`; None: the shipped one that is nearest. ConfigError for a name that is no mode."""
    if name not in NAMES:
        raise ConfigError(f"mode = {name!r}: must be {', '.join(NAMES)}", param="mode")
    mode = Mode.SLO if name == ORACLE else Mode(name)
    rules = Rules(mode=mode)
    if mode is Mode.TABLE and topology.decodes:
        rules = Rules(mode=mode, scored=scored or _table(nearest_table(topology)).scored(Weights()))
    return ProxySetup(rules=rules, slo=targets, oracle=name == ORACLE)


def nearest_table(topology: Topology) -> str:
    """The measured fleet whose share of P is most like this one's."""
    share = topology.prefills / (topology.prefills + topology.decodes)
    return min(TABLES, key=lambda name: abs(TABLES[name] - share))


@lru_cache(maxsize=4)
def _table(measured: str) -> DecisionTable:
    return DecisionTable.load(find(TABLE.format(measured)))
