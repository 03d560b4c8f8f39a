"""Each alert fires where what it tells of happens to the proxy's own metrics, and none in a fleet that is well."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.core import Metric

from ppd.proxy.admission.gate import MESSAGES
from ppd.proxy.assembly import assemble
from ppd.proxy.config import ProxyConfig
from ppd.proxy.fleet.booking import OpenHandoffs
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.health.poisoned_prompts import REASON
from ppd.proxy.laws.accuracy import Basis, Judged
from ppd.proxy.laws.corrections import TTFT
from ppd.proxy.settings import Settings
from ppd.proxy.telemetry.metrics import Metrics, fleet_gauges, gauge, laws_gauges
from tests.support.processes import worker

ROOT = Path(__file__).parents[1]
RULES = ROOT / "deploy" / "alerts.yaml"
SCRAPE_S = 15
SCRAPES = 120  # half an hour
Series = dict[str, list[str]]


class Story:
    """Half an hour of a proxy that answers a turn a second; `wrong` is called before each scrape but the first."""

    def __init__(self, wrong: Callable[[Story], None] = lambda story: None, up: int = 1) -> None:
        self.metrics = Metrics()
        self.wrong = wrong
        self.now_s = 0.0
        self.up = up
        self.registry, self.handoffs = Registry(), OpenHandoffs()
        self.queued = self.breakers_open = 0
        self.judged = [Judged(basis=Basis.PROFILE, name="h100", figure=TTFT, turns=200, median_error=0.1, stale=False)]
        self.metrics.watch(self._gauges)
        for address in ("a:1", "b:1"):
            worker(self.registry, address)
        prefill = Worker(role=Role.PREFILL, address="p:1", models=("m",))  # which answers nobody
        self.registry.add_static(prefill, 0.0)
        self.registry.probed(prefill.id, prefill, None, 0.0)

    def _gauges(self) -> Iterator[Metric]:
        yield from fleet_gauges(self.registry.views())
        yield from self.handoffs.gauges(self.now_s)
        yield from laws_gauges(self.judged)
        yield gauge("ppd_queued_turns", "", self.queued)
        yield gauge("ppd_breakers_open", "", self.breakers_open)

    def told(self) -> Series:
        """What each scrape found, by series; `_` where there was none."""
        found: Series = {}
        for scrape in range(SCRAPES):
            self.now_s = scrape * float(SCRAPE_S)
            self.turns(SCRAPE_S, "completed")
            if scrape:
                self.wrong(self)
            for name, value in self._scraped():
                found.setdefault(name, ["_"] * scrape).append(f"{value:g}")
        return found

    def _scraped(self) -> Iterator[tuple[str, float]]:
        yield 'up{instance="p:1",job="ppd"}', float(self.up)
        for family in self.metrics.registry.collect():
            for sample in family.samples:
                labels = {**sample.labels, "instance": "p:1", "job": "ppd"}
                text = ",".join(f"{name}={json.dumps(value)}" for name, value in sorted(labels.items()))
                yield f"{sample.name}{{{text}}}", sample.value

    # -- what may happen

    def turns(self, count: int, outcome: str) -> None:
        for _ in range(count):
            self.metrics.turns.add("LOCAL", "table_local", outcome)
            self.metrics.ttft.observe(0.1, "LOCAL")

    def once(self, at_s: float) -> bool:
        return at_s - SCRAPE_S < self.now_s <= at_s

    def down(self, *addresses: str) -> None:
        for view in self.registry.views():
            if view.id in addresses:
                self.registry.probe_failed(view.id, refused=True)

    def stranded(self) -> None:
        """Once a minute D does not take what P has computed for it."""
        if self.now_s % 60 == 0:
            self.handoffs.open(str(self.now_s), self.now_s)


def stale(story: Story) -> None:
    story.judged = [Judged(basis=Basis.PROFILE, name="h100", figure=TTFT, turns=200, median_error=0.6, stale=True)]


def slow(story: Story) -> None:
    story.metrics.ttft.observe(8.0, "SPLIT")


STORIES = {
    "PPDProxyGone": Story(up=0),
    "PPDNoWorker": Story(lambda story: story.down("a:1", "b:1")),
    "PPDWorkerDown": Story(lambda story: story.down("a:1")),
    "PPDTurnsFail": Story(lambda story: story.turns(1, "failed")),
    "PPDTurnsRejected": Story(lambda story: story.turns(3 * SCRAPE_S, "rejected")),
    "PPDRequestsRefused": Story(lambda story: story.metrics.refused.labels("queue_full").inc()),
    "PPDQueueStands": Story(lambda story: setattr(story, "queued", 2)),
    "PPDSlowFirstToken": Story(slow),
    "PPDRetryBudgetSpent": Story(lambda story: story.metrics.retries.labels("no_budget").inc()),
    "PPDBreakersOpen": Story(lambda story: setattr(story, "breakers_open", 1)),
    "PPDHandoffStranded": Story(Story.stranded),
    "PPDHandoffsMissing": Story(lambda story: story.metrics.handoffs_missing.labels("params_missing").inc()),
    "PPDResidencyMisses": Story(lambda story: story.metrics.residency_misses.inc(3)),
    "PPDHeartbeatsDropped": Story(lambda story: story.metrics.heartbeats.labels("dropped").inc()),
    "PPDConfigNotTaken": Story(lambda story: story.metrics.reloaded(False) if story.once(1200) else None),
    "PPDPredictionsStale": Story(stale),
}
BESIDE = {"PPDNoWorker": {"PPDWorkerDown"}}  # what else a story rightly fires


def well(story: Story) -> None:
    """A fleet has a few failures, refusals and handoffs under way, and its operator changes the config."""
    if story.once(600):
        story.turns(1, "failed")
        story.metrics.reloaded(True)
    if story.now_s % 30 == 0:
        story.handoffs.open("leg", story.now_s)
    else:
        story.handoffs.close("leg")
    story.turns(1, "cancelled")
    story.turns(2, "rejected")


def starting() -> Story:
    """A new proxy's turns wait for half a minute, until its workers have announced themselves."""
    story = Story(lambda story: setattr(story, "queued", 2 if story.now_s < 30 else 0))
    story.queued = 2
    return story


def promtool() -> str:
    """Skips where there is none."""
    own = ROOT / ".venv/promtool/usr/bin/promtool"
    named = os.environ.get("PPD_PROMTOOL", "promtool")
    found = shutil.which(named) or (str(own) if own.exists() else None)
    if found is None:
        assert "CI" not in os.environ, "make promtool"
        pytest.skip("no promtool: `make promtool` unpacks it from Debian's package; PPD_PROMTOOL names another")
    return found


def alert_names() -> set[str]:
    return {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}


def expected(firing: Iterable[str]) -> list[dict[str, Any]]:
    """That just these have fired by the end, or until then."""
    end = f"{SCRAPES * SCRAPE_S // 60 - 1}m"
    fired = 'count by (alertname) (count_over_time(ALERTS{alertstate="firing"}[30m])) * 0 + 1'
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)]
    return [{"expr": fired, "eval_time": end, "exp_samples": samples}]


@pytest.mark.slow
def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    assert set(STORIES) == alert_names()
    told = {name: (story, {name} | BESIDE.get(name, set())) for name, story in STORIES.items()}
    told["none, all is well"] = (Story(well), set())
    told["none, the proxy is new"] = (starting(), set())
    tests = [
        {
            "name": name,
            "interval": f"{SCRAPE_S}s",
            "input_series": [{"series": key, "values": " ".join(values)} for key, values in story.told().items()],
            "promql_expr_test": expected(firing),
        }
        for name, (story, firing) in told.items()
    ]
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": f"{SCRAPE_S}s", "tests": tests}))
    done = subprocess.run([promtool(), "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, re.sub(r"\n\s*\n+", "\n", done.stdout + done.stderr)


def test_promtool_takes_the_rules_and_the_scrape_config() -> None:
    for check in (("rules", "alerts.yaml"), ("config", "prometheus.yaml")):
        done = subprocess.run(
            [promtool(), "check", *check], cwd=RULES.parent, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_summary_names_no_rate_below_one() -> None:
    """`humanize` writes 0.07 a second as 70m."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            assert "| humanize }}" not in rule["annotations"]["summary"], rule["alert"]


def test_promtool_takes_the_dashboards_queries(tmp_path: Path) -> None:
    """As rules, with what Grafana puts in for its own names."""
    panels = json.loads((RULES.parent / "grafana/ppd.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    queries = [query.replace("$__rate_interval", "1m").replace("$instance", "a:1|b:1") for query in asked]
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "panels.yaml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run([promtool(), "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_refused_is_counted_from_none_on() -> None:
    """`rate` and `increase` see no first value of a series, so what has not happened yet is there as 0."""
    proxy = assemble(Settings(ProxyConfig(heartbeat_port=0)))
    found = {sample.labels["reason"] for one in proxy.state.metrics.refused.collect() for sample in one.samples}
    assert found == {*MESSAGES, REASON}
    proxy.listener.close()


def test_the_metrics_page_names_each_reason_that_is_counted() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    (row,) = re.findall(r"^\| `ppd_refused_total` .*", page, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row.partition(". Its other")[0])) >= {*MESSAGES, REASON}
