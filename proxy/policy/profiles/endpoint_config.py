"""An `EndpointPickerConfig` made into a schedule. What is wrong in it is told with its line and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Final

import msgspec

from ...config import ZeroMeans
from ...config.yaml_document import YamlNode
from .deciders import AlwaysSplit, Decider, OwnRule, PrefixBased
from .pickers import MaxScorePicker
from .plugins import DECIDER, FILTER, HANDLER, IN_PROFILES, KINDS, PICKER, SCORER, Handler, OwnIndex, Plugin
from .scene import Memory
from .schedule import EndpointsFile, Schedule, SchedulingProfile, WeightedScorer

KIND: Final = "EndpointPickerConfig"
API_VERSIONS: Final[Mapping[str, ZeroMeans]] = {
    "inference.networking.x-k8s.io/v1alpha1": ZeroMeans.ALWAYS,
    "llm-d.ai/v1alpha1": ZeroMeans.NEVER,
}
"""Each with what 0 `nonCachedTokens` meant when it was the newest."""

GATES: Final = ("prepareDataPlugins",)  # always on
MOST_PLUGINS: Final = 256
NAME_LIMIT: Final = 64


class NamedPlugin(msgspec.Struct, frozen=True):
    name: str
    type: str
    node: YamlNode
    plugin: Plugin

    @property
    def what(self) -> str:
        return KINDS[self.type].what


def schedule_of(document: YamlNode, text: str, zero_means: ZeroMeans) -> Schedule:
    """text: which the document was read from. ConfigError names what is wrong, and its line."""
    fields = document.fields("apiVersion", "kind", "featureGates", "plugins", "schedulingProfiles", "dataLayer")
    for name in ("apiVersion", "kind", "plugins"):
        if name not in fields:
            raise document.refused(f"must have {name}")
    version = fields["apiVersion"].text()
    if version not in API_VERSIONS:
        raise fields["apiVersion"].wrong(" or ".join(API_VERSIONS))
    if fields["kind"].value != KIND:
        raise fields["kind"].wrong(KIND)
    if "featureGates" in fields:
        _check_gates(fields["featureGates"])
    means = API_VERSIONS[version] if zero_means is ZeroMeans.API_VERSION else zero_means
    plugins = _plugins(fields["plugins"], means)
    profiles = _profiles(fields.get("schedulingProfiles"), fields["plugins"], plugins)
    node, handler = _handler(document, plugins)
    decode, prefill = _run(node, handler, profiles)
    return Schedule(
        decode=decode,
        prefill=prefill,
        decider=_decider(handler.decider, node, plugins) if handler.decider else None,
        is_prefill_first=handler.is_prefill_first,
        memory=_memory(plugins),
        api_version=version,
        zero_means=means,
        endpoints=_endpoints(fields.get("dataLayer"), plugins),
        source=text,
    )


def _check_gates(node: YamlNode) -> None:
    for gate in node.items():
        if gate.text() not in GATES:
            raise gate.wrong(f"{', '.join(GATES)}, which is always on; there are no other gates here")


def _plugins(node: YamlNode, means: ZeroMeans) -> dict[str, NamedPlugin]:
    found = dict[str, NamedPlugin]()
    for item in node.items():
        fields = item.fields("type", "name", "parameters")
        if "type" not in fields:
            raise item.refused("must have a type")
        kind = fields["type"].text()
        if kind not in KINDS:
            raise fields["type"].wrong(_known(kind, KINDS))
        named = fields.get("name", fields["type"])
        name = named.text()
        if len(name) > NAME_LIMIT:
            raise named.wrong(f"a name of at most {NAME_LIMIT} characters")
        if name in found:
            raise named.refused(f"{name!r} is the name of the plugin in line {found[name].node.line} too")
        known = KINDS[kind]
        given = fields["parameters"].fields(*known.parameters) if "parameters" in fields else {}
        found[name] = NamedPlugin(name, kind, item, known.make(given, item, means))
    if not 0 < len(found) <= MOST_PLUGINS:
        raise node.refused(f"must be 1 to {MOST_PLUGINS} plugins")
    return found


def _known(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = get_close_matches(name[:NAME_LIMIT], names, 1)
    return f"one of {', '.join(names)}" + (f"; did you mean {near[0]}?" if near else "")


def _named(node: YamlNode, plugins: Mapping[str, NamedPlugin], *allowed: str) -> NamedPlugin:
    """The plugin that a node names, of one of these kinds."""
    found = plugins.get(node.text())
    if found is None or found.what not in allowed:
        names = [each.name for each in plugins.values() if each.what in allowed]
        kinds = " or ".join(allowed)
        raise node.wrong(_known(node.text(), names) if names else f"a {kinds}, of which there is none")
    return found


def _profiles(
    node: YamlNode | None, listed: YamlNode, plugins: Mapping[str, NamedPlugin]
) -> dict[str, SchedulingProfile]:
    if node is None:  # then there is one, of all plugins
        usable = [(each, 1.0, each.node) for each in plugins.values() if each.what in IN_PROFILES]
        return {"default": _profile("default", listed, usable)}
    found = dict[str, SchedulingProfile]()
    for item in node.items():
        fields = item.fields("name", "plugins")
        if "name" not in fields:
            raise item.refused("must have a name")
        name = fields["name"].text()
        if name in found:
            raise fields["name"].refused(f"{name!r} is named twice")
        if "plugins" not in fields or not fields["plugins"].items():
            raise item.refused(f"profile {name!r} names no plugin; it must name one filter, scorer or picker at least")
        found[name] = _profile(name, item, [_reference(each, plugins) for each in fields["plugins"].items()])
    if not found:
        raise node.refused("must be one profile at least")
    return found


def _reference(node: YamlNode, plugins: Mapping[str, NamedPlugin]) -> tuple[NamedPlugin, float, YamlNode]:
    fields = node.fields("pluginRef", "weight")
    if "pluginRef" not in fields:
        raise node.refused("must have a pluginRef")
    found = _named(fields["pluginRef"], plugins, *sorted(IN_PROFILES))
    weight = fields["weight"].number() if "weight" in fields else 1.0
    if "weight" in fields and found.what != SCORER:
        raise fields["weight"].refused(f"{found.name!r} is a {found.what}; only scorers have weights")
    return found, weight, fields["pluginRef"]


def _profile(name: str, node: YamlNode, used: list[tuple[NamedPlugin, float, YamlNode]]) -> SchedulingProfile:
    parts: dict[str, list[tuple[NamedPlugin, float, YamlNode]]] = {FILTER: [], SCORER: [], PICKER: []}
    for one in used:
        if any(one[0] is each for each, _, _ in parts[one[0].what]):
            raise one[2].refused(f"profile {name!r} names {one[0].name!r} twice")
        parts[one[0].what].append(one)
    if len(parts[PICKER]) > 1:
        first, second = (each[0].name for each in parts[PICKER][:2])
        raise parts[PICKER][1][2].refused(f"profile {name!r} has two pickers, {first!r} and {second!r}; it takes one")
    return SchedulingProfile(
        name,
        tuple(each.plugin.part for each, _, _ in parts[FILTER]),  # type: ignore[misc]  # as `what` says
        tuple(WeightedScorer(each.name, each.plugin.part, weight) for each, weight, _ in parts[SCORER]),  # type: ignore[arg-type]
        parts[PICKER][0][0].plugin.part if parts[PICKER] else MaxScorePicker(),  # type: ignore[arg-type]
    )


def _handler(document: YamlNode, plugins: Mapping[str, NamedPlugin]) -> tuple[YamlNode, Handler]:
    """With where it stands; without one, that of a single profile."""
    handlers = [each for each in plugins.values() if each.what == HANDLER]
    if len(handlers) > 1:
        raise handlers[1].node.refused(f"there are two profile handlers, {handlers[0].name!r} and {handlers[1].name!r}")
    if not handlers:
        return document, Handler()
    part = handlers[0].plugin.part
    assert isinstance(part, Handler), "as `what` says"
    return handlers[0].node, part


def _run(
    node: YamlNode, handler: Handler, profiles: Mapping[str, SchedulingProfile]
) -> tuple[SchedulingProfile, SchedulingProfile | None]:
    """The profiles of D and of P that the handler runs."""
    if not handler.decode:
        if len(profiles) > 1:
            names = ", ".join(profiles)
            raise node.refused(f"there are the profiles {names}; to run more than one takes disagg-profile-handler")
        return next(iter(profiles.values())), None
    decode = _profile_named(handler.decode, node, profiles)
    if not handler.decider and not handler.is_prefill_first:
        return decode, None  # as llm-d does: no prompt goes to a P
    return decode, _profile_named(handler.prefill, node, profiles)


def _profile_named(
    name: YamlNode | str, handler: YamlNode, profiles: Mapping[str, SchedulingProfile]
) -> SchedulingProfile:
    text = name if isinstance(name, str) else name.text()
    if text not in profiles:
        names = ", ".join(profiles)
        raise (handler if isinstance(name, str) else name).refused(f"there is no profile {text!r}; there are {names}")
    return profiles[text]


def _decider(node: YamlNode | str, handler: YamlNode, plugins: Mapping[str, NamedPlugin]) -> Decider:
    """node: names it; a str: the name that the handler takes where none is given."""
    if isinstance(node, str) and node not in plugins:
        raise handler.refused(f"must have deciderPluginName, as there is no plugin {node!r}")
    part = (plugins[node] if isinstance(node, str) else _named(node, plugins, DECIDER)).plugin.part
    if not isinstance(part, PrefixBased | AlwaysSplit | OwnRule):
        raise handler.refused(f"the plugin {node!r} is no decider")
    return part


def _memory(plugins: Mapping[str, NamedPlugin]) -> Memory:
    chosen: OwnIndex | None = None
    for each in plugins.values():
        index = each.plugin.index
        if index is not None and chosen not in (None, index):
            raise each.node.refused("all prefix plugins share one index, and an earlier one gives it other sizes")
        chosen = index or chosen
    cold_kept = max(each.plugin.cold_kept for each in plugins.values())
    return Memory(None, cold_kept=cold_kept) if chosen is None else Memory(chosen.rule, chosen.capacity, cold_kept)


def _endpoints(node: YamlNode | None, plugins: Mapping[str, NamedPlugin]) -> EndpointsFile | None:
    """Where it is named by `dataLayer.discovery`, or is the only one that is there."""
    named = node.fields("discovery").get("discovery") if node is not None else None
    reference = named.fields("pluginRef").get("pluginRef") if named is not None else None
    if reference is not None:
        part = _named(reference, plugins, "discovery").plugin.part
    else:
        part = next((each.plugin.part for each in plugins.values() if each.what == "discovery"), None)  # type: ignore[assignment]
    assert part is None or isinstance(part, EndpointsFile), "as `what` says"
    return part
