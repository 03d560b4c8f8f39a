"""The proxy's settings: one frozen dataclass, checked once, built from a TOML file and flags.

To add a key, add a field to `ProxyConfig` in `keys.py`: its type, default, and what it is for. Its checks, its flag and
help, its row in the README (`python -m ppd.proxy.config.reference README.md`) and its part of the JSON Schema follow.
"""

from .choices import AccessFormat, DataPlane, LogFormat, LogLevel, Lookup, Mode, SessionKey, Uncovered
from .keys import (
    ANY_ORIGIN,
    KEYS,
    LIVE,
    OPERATOR_PATHS,
    SECRET,
    ProxyConfig,
    all_of,
    is_loopback,
    refused,
)
from .load import Draft, build, convert, secrets_in, with_changes

__all__ = [
    "ANY_ORIGIN",
    "KEYS",
    "LIVE",
    "OPERATOR_PATHS",
    "SECRET",
    "AccessFormat",
    "DataPlane",
    "Draft",
    "LogFormat",
    "LogLevel",
    "Lookup",
    "Mode",
    "ProxyConfig",
    "SessionKey",
    "Uncovered",
    "all_of",
    "build",
    "convert",
    "is_loopback",
    "refused",
    "secrets_in",
    "with_changes",
]
