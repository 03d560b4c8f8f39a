"""The proxy's settings: one frozen dataclass, checked once, built from a TOML file and flags.

To add a key, add a field to `ProxyConfig` in `keys.py`: its type, default, and what it is for. Its checks, its flag and
help, its row in docs/configuration.md (`python -m ppd.proxy.config.reference docs/configuration.md`) and its part of
the JSON Schema follow.
"""

from .addresses import ANY_ORIGIN, PORT_PATTERN, cannot_listen, host_and_port, is_ipv6, is_loopback
from .choices import (
    AccessFormat,
    DataPlane,
    EncoderUse,
    LogFormat,
    LogLevel,
    Lookup,
    Mode,
    SessionKey,
    StageOrder,
    Uncovered,
    ZeroMeans,
)
from .keys import (
    KEYS,
    LIVE,
    OPERATOR_PATHS,
    SECRET,
    ProxyConfig,
    all_of,
    refused,
)
from .load import Draft, build, convert, secrets_in, with_changes
from .notices import notices

__all__ = [
    "ANY_ORIGIN",
    "KEYS",
    "LIVE",
    "OPERATOR_PATHS",
    "PORT_PATTERN",
    "SECRET",
    "AccessFormat",
    "DataPlane",
    "Draft",
    "EncoderUse",
    "LogFormat",
    "LogLevel",
    "Lookup",
    "Mode",
    "ProxyConfig",
    "SessionKey",
    "StageOrder",
    "Uncovered",
    "ZeroMeans",
    "all_of",
    "build",
    "cannot_listen",
    "convert",
    "host_and_port",
    "is_ipv6",
    "is_loopback",
    "notices",
    "refused",
    "secrets_in",
    "with_changes",
]
