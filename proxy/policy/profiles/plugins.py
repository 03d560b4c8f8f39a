"""Plugins by their types, as an `EndpointPickerConfig` names them, made from their parameters.

Names and defaults are llm-d's (llm-d-router, `pkg/epp/framework/plugins`), also those that it has renamed since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from ...config import Mode, ZeroMeans
from ...config.yaml_document import YamlNode
from .deciders import OWN_RULES, AlwaysSplit, Decider, OwnRule, PrefixBased
from .filters import DECODES, PREFILLS, ByLabel, ByPhase, BySelector, Filter, LabelTest, SessionOnly
from .pickers import MaxScorePicker, Picker, RandomPicker, WeightedRandomPicker
from .prompt_blocks import BlockRule
from .schedule import EndpointsFile
from .scorers import (
    ActiveRequestScorer,
    KvUsageScorer,
    LoadAwareScorer,
    NoHitLruScorer,
    PrefixCacheScorer,
    QueueScorer,
    Scorer,
    SessionScorer,
)

MOST_CAPACITY: Final = 10_000_000
MOST_BLOCKS: Final = 65_536
DECODE_FIRST, PREFILL_FIRST = "decode-first", "prefill-first"


class OwnIndex(msgspec.Struct, frozen=True):
    """An index of what was sent, of its own."""

    rule: BlockRule
    capacity: int  # blocks of a server


class Handler(msgspec.Struct, frozen=True):
    """Which profiles run, in which order, and who decides on P. Empty names: there is none."""

    decode: YamlNode | str = ""  # empty: the only profile
    prefill: YamlNode | str = ""
    decider: YamlNode | str = ""
    is_prefill_first: bool = False


class Nothing(msgspec.Struct, frozen=True):
    """A plugin whose work is done here in any case."""


class Plugin(msgspec.Struct, frozen=True):
    """What a plugin is here; one of several parts is set."""

    part: Filter | Scorer | Picker | Decider | Handler | EndpointsFile | Nothing
    index: OwnIndex | None = None
    cold_kept: int = 0


Parameters = Mapping[str, YamlNode]


class PluginKind(msgspec.Struct, frozen=True):
    """A type of plugin: what it is called in errors, its parameters, and how it is made of them."""

    what: str
    parameters: tuple[str, ...]
    make: Callable[[Parameters, YamlNode, ZeroMeans], Plugin]  # with the plugin's own node


def _fixed(what: str, part: Filter | Scorer | Picker | Decider | Handler | Nothing, *parameters: str) -> PluginKind:
    """Of which no parameter changes anything here."""
    return PluginKind(what, parameters, lambda given, node, zero: Plugin(part))


def _made(what: str, make: Callable[[Parameters], Filter | Scorer | Decider | Handler], *parameters: str) -> PluginKind:
    return PluginKind(what, parameters, lambda given, node, zero: Plugin(make(given)))


def _whole(given: Parameters, name: str, default: int, least: int = 0, most: int = 2**53) -> int:
    return given[name].whole(least, most) if name in given else default


def _number(given: Parameters, name: str, default: float, least: float, most: float) -> float:
    return given[name].number(least, most) if name in given else default


def _by_label(given: Parameters, node: YamlNode, zero: ZeroMeans) -> Plugin:
    if "label" not in given:
        raise node.refused("parameters.label: must name a label")
    allows_none = given["allowsNoLabel"].flag() if "allowsNoLabel" in given else False
    values = frozenset(given["validValues"].texts()) if "validValues" in given else frozenset[str]()
    if not values and not allows_none:
        raise node.refused("parameters: must have validValues, or allowsNoLabel: true")
    return Plugin(ByLabel(given["label"].text(), values, allows_none))


def _by_selector(given: Parameters) -> Filter:
    tests = list[LabelTest]()
    if "matchLabels" in given:
        for label, value in given["matchLabels"].every_field().items():
            tests.append(LabelTest(label, "In", frozenset((value.text(),))))
    for node in given["matchExpressions"].items() if "matchExpressions" in given else ():
        fields = node.fields("key", "operator", "values")
        if "key" not in fields or "operator" not in fields:
            raise node.refused("must have key and operator")
        operator = fields["operator"].text()
        if operator not in ("In", "NotIn", "Exists", "DoesNotExist"):
            raise fields["operator"].wrong("In, NotIn, Exists or DoesNotExist")
        values = frozenset(fields["values"].texts()) if "values" in fields else frozenset[str]()
        if bool(values) != operator.endswith("In"):
            raise node.refused("must have values with In and NotIn, and none with Exists and DoesNotExist")
        tests.append(LabelTest(fields["key"].text(), operator, values))
    return BySelector(tuple(tests))


def _prefix_scorer(given: Parameters, node: YamlNode, zero: ZeroMeans) -> Plugin:
    scorer = PrefixCacheScorer(
        _number(given, "matchLengthWeight", 0.0, 0.0, 1.0), _whole(given, "matchLengthScaleTokens", 8192, least=1)
    )
    return Plugin(scorer, index=_own_index(given, "blockSize"))


def _own_index(given: Parameters, block_size: str) -> OwnIndex | None:
    """None where the proxy's beliefs are read: where engines' own figures are asked for, or no sizes are given."""
    tunes = given["autoTune"].flag() if "autoTune" in given else None
    block = _whole(given, block_size, 16, least=1, most=MOST_BLOCKS)
    most = _whole(given, "maxPrefixBlocksToMatch", 256, least=1, most=MOST_BLOCKS)
    if "maxPrefixTokensToMatch" in given:
        most = max(1, given["maxPrefixTokensToMatch"].whole(1) // block)
    capacity = _whole(given, "lruCapacityPerServer", 31_250, least=1, most=MOST_CAPACITY)
    is_sized = {block_size, "maxPrefixBlocksToMatch", "lruCapacityPerServer"} <= given.keys()
    if tunes is True or (tunes is None and not is_sized):
        return None
    return OwnIndex(BlockRule(block, most), capacity)


def _no_hit(given: Parameters, node: YamlNode, zero: ZeroMeans) -> Plugin:
    return Plugin(NoHitLruScorer(), cold_kept=_whole(given, "lruSize", 1024, least=1, most=MOST_CAPACITY))


def _active(given: Parameters) -> Scorer:
    return ActiveRequestScorer(_whole(given, "idleThreshold", 0), _number(given, "maxBusyScore", 1.0, 0.0, 1.0))


def _prefix_decider(given: Parameters, node: YamlNode, zero: ZeroMeans) -> Plugin:
    return Plugin(PrefixBased(_whole(given, "nonCachedTokens", 0), zero, _whole(given, "promptTokens", 0)))


def _own_rule(given: Parameters) -> Decider:
    if "mode" not in given:
        return OwnRule()
    known = {mode.value: mode for mode in OWN_RULES}
    name = given["mode"].text()
    if name not in known:
        raise given["mode"].wrong("one of " + ", ".join(known))
    return OwnRule(Mode(name))


def _pd_handler(given: Parameters) -> Handler:
    _whole(given, "primaryPort", 0, most=65_535)
    return Handler(
        given.get("decodeProfile", "decode"),
        given.get("prefillProfile", "prefill"),
        given.get("deciderPluginName", "prefix-based-pd-decider"),
    )


def _disagg_handler(given: Parameters) -> Handler:
    profiles = given["profiles"].fields("decode", "prefill", "encode") if "profiles" in given else {}
    deciders = given["deciders"].fields("prefill", "encode") if "deciders" in given else {}
    for fields in (profiles, deciders):
        if "encode" in fields:
            raise fields["encode"].refused("there is no stage for encoders here")
    order = given["stageOrder"].text() if "stageOrder" in given else DECODE_FIRST
    if order not in (DECODE_FIRST, PREFILL_FIRST):
        raise given["stageOrder"].wrong(f"{DECODE_FIRST} or {PREFILL_FIRST}")
    decider = deciders.get("prefill") or given.get("deciderPluginName") or given.get("prefillDeciderPluginName")
    if decider is not None and order == PREFILL_FIRST:
        raise decider.refused(f"with stageOrder {PREFILL_FIRST} every prompt goes to a P, and no decider is asked")
    return Handler(
        profiles.get("decode") or given.get("decodeProfile") or "decode",
        profiles.get("prefill") or given.get("prefillProfile") or "prefill",
        decider or "",
        order == PREFILL_FIRST,
    )


def _endpoints(given: Parameters, node: YamlNode, zero: ZeroMeans) -> Plugin:
    if "path" not in given:
        raise node.refused("parameters.path: must name the file of endpoints")
    is_watched = given["watchFile"].flag() if "watchFile" in given else False
    return Plugin(EndpointsFile(given["path"].text(), is_watched))


FILTER, SCORER, PICKER, HANDLER, DECIDER = "filter", "scorer", "picker", "handler", "decider"
IN_PROFILES: Final = frozenset({FILTER, SCORER, PICKER})
_SESSION: Final = ("strategy", "encodedEndpointHeaderConfig", "sessionIdConfig", "profileName")
_SIZES: Final = ("autoTune", "maxPrefixBlocksToMatch", "lruCapacityPerServer")
_PRODUCER: Final = "prefixMatchInfoProducerName"

KINDS: Final[Mapping[str, PluginKind]] = {
    "by-label": PluginKind(FILTER, ("label", "validValues", "allowsNoLabel"), _by_label),
    "label-selector-filter": _made(FILTER, _by_selector, "matchLabels", "matchExpressions"),
    "by-label-selector": _made(FILTER, _by_selector, "matchLabels", "matchExpressions"),
    "prefill-filter": _fixed(FILTER, ByPhase(PREFILLS)),
    "decode-filter": _fixed(FILTER, ByPhase(DECODES)),
    "session-affinity-filter": _fixed(FILTER, SessionOnly(), *_SESSION),
    "prefix-cache-scorer": PluginKind(
        SCORER, (*_SIZES, "blockSize", "matchLengthWeight", "matchLengthScaleTokens", _PRODUCER), _prefix_scorer
    ),
    "queue-scorer": _fixed(SCORER, QueueScorer()),
    "kv-cache-utilization-scorer": _fixed(SCORER, KvUsageScorer()),
    "load-aware-scorer": _made(
        SCORER, lambda given: LoadAwareScorer(_whole(given, "threshold", 128, least=1)), "threshold"
    ),
    "active-request-scorer": _made(SCORER, _active, "idleThreshold", "maxBusyScore", "requestTimeout"),
    "session-affinity-scorer": _fixed(SCORER, SessionScorer(), *_SESSION),
    "no-hit-lru-scorer": PluginKind(SCORER, ("lruSize", "prefixPluginType", "prefixPluginName", _PRODUCER), _no_hit),
    "max-score-picker": _fixed(PICKER, MaxScorePicker(), "maxNumOfEndpoints"),
    "weighted-random-picker": _fixed(PICKER, WeightedRandomPicker(), "maxNumOfEndpoints"),
    "random-picker": _fixed(PICKER, RandomPicker(), "maxNumOfEndpoints"),
    "single-profile-handler": _fixed(HANDLER, Handler()),
    "pd-profile-handler": _made(
        HANDLER,
        _pd_handler,
        *("decodeProfile", "prefillProfile", "deciderPluginName", "primaryPort"),
        *("prefixPluginType", "prefixPluginName", _PRODUCER),
    ),
    "disagg-profile-handler": _made(
        HANDLER,
        _disagg_handler,
        *("stageOrder", "profiles", "deciders"),
        *("decodeProfile", "prefillProfile", "deciderPluginName", "prefillDeciderPluginName"),
    ),
    "prefix-based-pd-decider": PluginKind(DECIDER, ("nonCachedTokens", "promptTokens"), _prefix_decider),
    "always-disagg-pd-decider": _fixed(DECIDER, AlwaysSplit()),
    "ppd-decider": _made(DECIDER, _own_rule, "mode"),
    "prefill-header-handler": _fixed("header handler", Nothing(), "prefillProfile"),
    "disagg-headers-handler": _fixed("header handler", Nothing(), "prefillProfile", "encodeProfile"),
    "approx-prefix-cache-producer": PluginKind(
        "producer",
        (*_SIZES, "blockSizeTokens", "maxPrefixTokensToMatch"),
        lambda given, node, zero: Plugin(Nothing(), index=_own_index(given, "blockSizeTokens")),
    ),
    "file-discovery": PluginKind("discovery", ("path", "watchFile"), _endpoints),
}
