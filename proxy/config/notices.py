"""What a config says in vain: told as warnings, as it keeps no proxy from starting."""

from __future__ import annotations

from .addresses import is_loopback
from .constraints import Constraint
from .keys import KEYS, ProxyConfig

_OF_PICKERS = ("picker_host", "picker_health_port", "picker_shadow", "picker_fallbacks", "picker_workers_file")

# Keys that do nothing unless others are set. Those of modes are not here: the admin API may choose their mode later.
_NEEDS = (
    *(Constraint((name, "picker_port"), "needs picker_port", lambda _, port: port) for name in _OF_PICKERS),
    Constraint(
        ("heartbeat_allow", "heartbeat_port", "curve_port"),
        "needs heartbeat_port or curve_port",
        lambda _, plain, curve: plain or curve,
    ),
    Constraint(
        ("heartbeat_open", "heartbeat_host", "heartbeat_port"),
        "needs heartbeat_port, and a heartbeat_host that other machines reach",
        lambda _, host, port: port and not is_loopback(host),
    ),
    Constraint(("tokenizer_wait_s", "tokenizer"), "needs tokenizer", lambda _, folder: folder),
    Constraint(("zero_means", "epp_config"), "needs epp_config", lambda _, file: file),
)


def notices(config: ProxyConfig) -> list[str]:
    """One line each, which names its keys."""
    idle = [one for one in _NEEDS if _is_set(config, one.keys[0]) and not one.holds(*_values(config, one))]
    said = [f"{one.keys[0]} = {_shown(config, one.keys[0])} has no effect: it {one.allowed}" for one in idle]
    return said if (told := _of_prefill(config)) is None else [*said, told]


def _of_prefill(config: ProxyConfig) -> str | None:
    """P may take longer than its handoff may be old. Not where nobody has asked for that."""
    if config.prefill_timeout_s <= config.handoff_max_age_s:
        return None
    if not _is_set(config, "prefill_timeout_s") and not _is_set(config, "handoff_max_age_s"):
        return None
    return (
        f"prefill_timeout_s = {config.prefill_timeout_s:g} is above handoff_max_age_s = {config.handoff_max_age_s:g}, "
        "which lies below the lease of P's KV: a prompt that takes P longer is sent to P again, or D computes it alone"
    )


def _is_set(config: ProxyConfig, name: str) -> bool:
    return bool(getattr(config, name) != KEYS[name].default)


def _values(config: ProxyConfig, constraint: Constraint) -> list[object]:
    return [getattr(config, name) for name in constraint.keys]


def _shown(config: ProxyConfig, name: str) -> str:
    return KEYS[name].shown(getattr(config, name))
