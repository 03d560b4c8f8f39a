"""Settings that are one of a few words."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """How follow-up turns are routed, and turn 1 where a D holds most of it; else turn 1 is SPLIT, but in `replica`."""

    TABLE = "table"  # by the decision table
    ALWAYS_LOCAL = "always_local"  # x = 1
    SESSION_HASH = "session_hash"  # x = 1, each session's worker by a hash
    FREE_KV = "free_kv"  # x = 1, a session begins where most KV is free
    ALWAYS_SPLIT = "always_split"  # x = 0
    FRACTION = "fraction"  # the share `x` of sessions
    REPLICA = "replica"  # every turn on a replica
    PREFIX_THRESHOLD = "prefix_threshold"  # LOCAL for few uncached tokens
    ISL_BOUNDING = "isl_bounding"  # LOCAL for few uncached tokens that are a small share of the prompt
    PREFILL_LOAD = "prefill_load"  # LOCAL while P has much to do
    ISL_OR_LOAD = "isl_or_load"  # either of the two
    CONDITIONAL = "conditional"  # SPLIT for many uncached tokens, while P has little to do
    SLO = "slo"  # the fewest turns that miss their targets, as predicted
    WEIGHTS = "weights"  # the least of predicted TTFT and TPOT, weighted
    LEAST_TTFT = "least_ttft"  # the earliest predicted first token
    LMETRIC = "lmetric"  # the least product of new tokens and batch
    SLACK = "slack"  # the least TPOT among ways that keep the TTFT target
    PROFILES = "profiles"  # by llm-d's plugins, as its configuration names them


class StageOrder(StrEnum):
    """Which of the two workers of a SPLIT is chosen first; the other is one of those that it pairs with."""

    MODE = "mode"  # as the mode has it
    PREFILL_FIRST = "prefill_first"
    DECODE_FIRST = "decode_first"  # and the mode judges what this D lacks


class SessionKey(StrEnum):
    """What makes two requests one session."""

    PREFIX = "prefix"  # the messages themselves, and explicit ids
    FIRST_USER_MESSAGE = "first_user_message"  # the paper's rule: MD5 of the first user message


class Uncovered(StrEnum):
    """What a follow-up turn does where the table has no evidence."""

    LOCAL = "local"
    SPLIT = "split"


class Lookup(StrEnum):
    """How a turn finds its verdict in a table."""

    NEAREST = "nearest"  # the nearest cell's: the paper's way
    INTERPOLATED = "interpolated"  # between cells, linear in logarithms


class ZeroMeans(StrEnum):
    """What 0 means as a limit of uncached tokens in llm-d's configuration; `always` goes with >, `never` with >=."""

    API_VERSION = "api_version"  # as it was when that version was the newest
    ALWAYS = "always"  # every prompt goes to a P
    NEVER = "never"  # none does


class EncoderUse(StrEnum):
    """Which of a request's items go to an encoder."""

    AUTO = "auto"  # those that cost less there
    ALWAYS = "always"
    NEVER = "never"


class DataPlane(StrEnum):
    """What serves turns over HTTP/1.1; over HTTP/2 it is always the ASGI application."""

    NATIVE = "native"  # the connection itself, on compiled sockets
    DIRECT = "direct"  # the connection itself
    ASGI = "asgi"  # the ASGI application, in Quart

    def serving(self, is_built: bool) -> DataPlane:
        """The one that serves in its place where the compiled modules may be missing."""
        return DataPlane.DIRECT if self is DataPlane.NATIVE and not is_built else self


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class AccessFormat(StrEnum):
    OFF = "off"
    TEXT = "text"
    JSON = "json"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"
