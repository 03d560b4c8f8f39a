"""llm-d's `EndpointPickerConfig`: what it becomes, and what is told of what cannot be used."""

from __future__ import annotations

import pytest

from ppd.proxy.config import ZeroMeans
from ppd.proxy.errors import ConfigError
from ppd.proxy.policy.profiles.deciders import PrefixBased
from ppd.proxy.policy.profiles.filters import ByLabel
from ppd.proxy.policy.profiles.pickers import MaxScorePicker, RandomPicker
from ppd.proxy.policy.profiles.plugins import KINDS
from ppd.proxy.policy.profiles.prompt_blocks import BlockRule
from tests.support.decisions import LLM_D_EXAMPLE, LLM_D_HEAD, schedule_from

OLD = "inference.networking.x-k8s.io/v1alpha1"


def test_the_proposals_example_is_read_as_it_stands() -> None:
    schedule = schedule_from(LLM_D_EXAMPLE.read_text())
    assert schedule.decode.filters == (ByLabel("role", frozenset({"decode"})),)
    assert schedule.prefill is not None
    assert schedule.prefill.filters == (ByLabel("role", frozenset({"prefill"})),)
    assert [(each.name, each.weight) for each in schedule.decode.scorers] == [("prefix-cache-scorer", 1.0)]
    assert isinstance(schedule.decode.picker, MaxScorePicker)
    assert schedule.decider == PrefixBased(8, ZeroMeans.ALWAYS)
    assert schedule.memory.rule == BlockRule(5, 256)
    assert not schedule.is_prefill_first
    assert schedule.describe() == f"{OLD}; uncached > nonCachedTokens is SPLIT, where 0 means always"


@pytest.mark.parametrize(
    ("version", "key", "means"),
    [
        (OLD, ZeroMeans.API_VERSION, ZeroMeans.ALWAYS),
        ("llm-d.ai/v1alpha1", ZeroMeans.API_VERSION, ZeroMeans.NEVER),
        (OLD, ZeroMeans.NEVER, ZeroMeans.NEVER),
        ("llm-d.ai/v1alpha1", ZeroMeans.ALWAYS, ZeroMeans.ALWAYS),
    ],
)
def test_the_version_says_what_zero_means_and_the_key_overrides_it(version: str, key: ZeroMeans, means: str) -> None:
    text = f"apiVersion: {version}\nkind: EndpointPickerConfig\nplugins:\n- type: queue-scorer\n"
    assert schedule_from(text, key).zero_means is means


PLUGINS = "plugins:\n- type: queue-scorer\n- type: random-picker\n- type: max-score-picker\n"
RUNS_QUEUE = "schedulingProfiles:\n- name: default\n  plugins:\n  - pluginRef: queue-scorer\n"


def test_what_is_not_said_is_as_in_llm_d() -> None:
    schedule = schedule_from(
        LLM_D_HEAD + "plugins:\n- type: decode-filter\n- type: queue-scorer\n- type: random-picker\n"
    )
    assert (schedule.decode.name, schedule.prefill, schedule.decider) == ("default", None, None)
    assert (len(schedule.decode.filters), len(schedule.decode.scorers)) == (1, 1)
    assert isinstance(schedule.decode.picker, RandomPicker)
    assert isinstance(schedule_from(LLM_D_HEAD + PLUGINS + RUNS_QUEUE).decode.picker, MaxScorePicker)


SIZES = "maxPrefixBlocksToMatch: 20, lruCapacityPerServer: 30"


@pytest.mark.parametrize(
    ("plugin", "rule"),
    [
        ("prefix-cache-scorer", None),
        ("{type: prefix-cache-scorer, parameters: {blockSize: 8}}", None),
        (f"{{type: prefix-cache-scorer, parameters: {{blockSize: 8, {SIZES}}}}}", BlockRule(8, 20)),
        (f"{{type: prefix-cache-scorer, parameters: {{autoTune: true, blockSize: 8, {SIZES}}}}}", None),
        ("{type: prefix-cache-scorer, parameters: {autoTune: false}}", BlockRule(16, 256)),
        (f"{{type: approx-prefix-cache-producer, parameters: {{blockSizeTokens: 64, {SIZES}}}}}", BlockRule(64, 20)),
    ],
)
def test_an_index_of_its_own_is_kept_where_sizes_are_given(plugin: str, rule: BlockRule | None) -> None:
    text = plugin if plugin.startswith("{") else f"{{type: {plugin}}}"
    assert schedule_from(f"{LLM_D_HEAD}plugins:\n- {text}\n- type: queue-scorer\n").memory.rule == rule


def profile(lines: str) -> str:
    return f"{LLM_D_HEAD}{PLUGINS}schedulingProfiles:\n- name: default\n  plugins:\n{lines}"


def disagg(parameters: str) -> str:
    return f"{LLM_D_HEAD}{PLUGINS}- type: disagg-profile-handler\n  parameters: {{{parameters}}}\n{RUNS_QUEUE}"


BOTH = "profiles: {decode: default, prefill: default}, "
OTHER = "- name: b\n  plugins: [{pluginRef: queue-scorer}]\n"


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("kind: EndpointPickerConfig\nplugins: []\n", 1, "must have apiVersion"),
        (
            LLM_D_HEAD.replace("llm-d.ai", "llm-d.io") + PLUGINS,
            1,
            "must be inference.networking.x-k8s.io/v1alpha1 or llm-d",
        ),
        (LLM_D_HEAD.replace("EndpointPicker", "Pod") + PLUGINS, 2, "kind = 'PodConfig': must be EndpointPickerConfig"),
        (LLM_D_HEAD + PLUGINS + "flowControl: {}\n", 7, "flowControl: no such field; known are apiVersion"),
        (
            LLM_D_HEAD + "featureGates: [flowControl]\n" + PLUGINS,
            3,
            "featureGates[0] = 'flowControl': must be prepareData",
        ),
        (
            LLM_D_HEAD + "plugins:\n- type: queue-score\n",
            4,
            "plugins[0].type = 'queue-score': must be one of by-label, ",
        ),
        (LLM_D_HEAD + "plugins:\n- type: queue-score\n", 4, "did you mean queue-scorer?"),
        (LLM_D_HEAD + "plugins:\n- type: encode-filter\n", 4, "'encode-filter': must be one of"),
        (LLM_D_HEAD + "plugins:\n- name: a\n", 4, "must have a type"),
        (LLM_D_HEAD + "plugins:\n- type: queue-scorer\n- type: queue-scorer\n", 5, "of the plugin in line 4 too"),
        (
            LLM_D_HEAD + "plugins:\n- type: queue-scorer\n  parameters:\n    a: 1\n",
            6,
            "parameters.a: no such field; known are none",
        ),
        (
            LLM_D_HEAD + "plugins:\n- type: always-disagg-pd-decider\n  parameters:\n    a: 1\n",
            6,
            "parameters.a: no such field; known are none",
        ),
        (LLM_D_HEAD + "plugins:\n- {type: by-label, parameters: {label: role}}\n", 4, "validValues, or allowsNoLabel"),
        (LLM_D_HEAD + "plugins: []\n", 3, "must be 1 to 256 plugins"),
        (LLM_D_HEAD + PLUGINS + "schedulingProfiles:\n- name: a\n  plugins: []\n", 8, "profile 'a' names no plugin"),
        (LLM_D_HEAD + PLUGINS + "schedulingProfiles:\n- name: a\n", 8, "profile 'a' names no plugin"),
        (profile("  - pluginRef: queue-scorer\n" * 2), 11, "names 'queue-scorer' twice"),
        (profile("  - pluginRef: queue\n"), 10, "pluginRef = 'queue': must be one of queue-scorer"),
        (profile("  - pluginRef: random-picker\n  - pluginRef: max-score-picker\n"), 11, "has two pickers, 'random-pi"),
        (profile("  - pluginRef: queue-scorer\n    weight: .nan\n"), 11, "weight = nan: must be a finite number"),
        (profile("  - pluginRef: queue-scorer\n    weight: -.inf\n"), 11, "weight = -inf: must be a finite number"),
        (profile("  - pluginRef: queue-scorer\n    weight: 1e400\n"), 11, "must be a finite number"),
        (profile("  - pluginRef: queue-scorer\n    weight: '2'\n"), 11, "weight = '2': must be a finite number"),
        (profile("  - pluginRef: random-picker\n    weight: 2\n"), 11, "is a picker; only scorers have weights"),
        (LLM_D_HEAD + PLUGINS + RUNS_QUEUE + RUNS_QUEUE.partition("\n")[2], 11, "'default' is named twice"),
        (LLM_D_HEAD + PLUGINS + RUNS_QUEUE + OTHER, 1, "takes disagg-profile"),
        (disagg("stageOrder: both"), 8, "must be decode-first or prefill-first"),
        (disagg("deciders: {encode: a}"), 8, "no stage for encoders"),
        (disagg(""), 7, "there is no profile 'decode'; there are default"),
        (disagg("profiles: {decode: default}, deciders: {prefill: queue-scorer}"), 7, "there is no profile 'prefill'"),
        (disagg("stageOrder: prefill-first, deciders: {prefill: queue-scorer}"), 8, "no decider is asked"),
        (disagg(BOTH + "deciders: {prefill: queue-scorer}"), 8, "'queue-scorer': must be a decider, of which there is"),
        (
            LLM_D_HEAD + "plugins:\n- type: pd-profile-handler\n" + RUNS_QUEUE,
            8,
            "must be a filter or picker or scorer, of w",
        ),
        (LLM_D_HEAD + "plugins: &all\n- type: queue-scorer\ndataLayer: *all\n", 3, "aliases are not read"),
        (LLM_D_HEAD + "kind: a\n", 3, "kind: named twice"),
        (LLM_D_HEAD + "plugins: [\n", 4, "must be YAML"),
        (LLM_D_HEAD + "plugins:\n- type: 2026-11-24\n", 4, "must be text, a number, true, false or null"),
        ("", 0, "must hold a document"),
        ("- a\n", 1, "the document = a list: must be a map"),
    ],
)
def test_what_cannot_be_used_is_told_with_its_line_and_what_is_allowed(text: str, line: int, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        schedule_from(text)
    message = refused.value.message
    assert told in message
    assert message.startswith(f"epp_config, epp.yaml:{line}: " if line else "epp_config, epp.yaml: ")
    assert refused.value.param == "epp_config"


@pytest.mark.slow
@pytest.mark.parametrize("depth", [100, 3_000])
def test_a_document_of_any_depth_is_refused_in_one_line(depth: int) -> None:
    with pytest.raises(ConfigError, match=r"nested deeper than 32|must be YAML"):
        schedule_from(LLM_D_HEAD + "plugins: " + "[" * depth + "]" * depth)


PARAMETERS = {
    "by-label": "{label: role, validValues: [a]}",
    "file-discovery": "{path: /etc/epp/endpoints.yaml, watchFile: true}",
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_plugin_may_be_listed(kind: str) -> None:
    given = PARAMETERS.get(kind, "{}")
    decider = "- type: prefix-based-pd-decider\n" if kind == "pd-profile-handler" else ""
    profiles = "".join(f"- name: {name}\n  plugins: [{{pluginRef: one}}]\n" for name in ("decode", "prefill"))
    if kind not in ("pd-profile-handler", "disagg-profile-handler"):
        profiles = profiles.partition("- name: prefill")[0]
    text = (
        f"{LLM_D_HEAD}plugins:\n- {{type: queue-scorer, name: one}}\n{decider}- {{type: {kind}, parameters: {given}}}\n"
    )
    assert schedule_from(f"{text}schedulingProfiles:\n{profiles}").decode.name == "decode"
