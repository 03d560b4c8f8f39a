"""What operators start with agrees with the programs: metrics, commands, keys of the config, files."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import click
import pytest
import yaml  # type: ignore[import-untyped]

from ppd.offline.cli.main import main
from ppd.proxy.config import ProxyConfig, build
from tests.metric_names import bare, declared

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DOCKERFILE = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
DASHBOARD = json.loads((DEPLOY / "grafana/ppd.json").read_text())
PROVISIONING = Path("/etc/grafana/provisioning")
OWN_LABELS = {"instance", "job", "le"}  # Prometheus' own, and a histogram's
SUFFIX = re.compile(r"_(total|bucket|sum|count)$")


def alerts() -> Iterator[str]:
    for group in yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def panels() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])


@pytest.mark.slow
def test_the_code_declares_what_the_metrics_page_shows() -> None:
    known = declared()
    assert known["ppd_turns"] == {"route", "reason"}
    assert known["ppd_workers"] == {"role", "state"}
    assert known["ppd_ttft_seconds"] == {"route"}
    assert len(known) > 25


@pytest.mark.slow
@pytest.mark.parametrize("expression", [*alerts(), *panels()])
def test_every_metric_and_label_that_is_named_exists(expression: str) -> None:
    known = declared()
    names = re.findall(r"\bppd_[a-z_]+", expression)
    assert names or "up{" in expression
    labels = set(OWN_LABELS)
    for name in names:
        assert bare(name) in known, name
        labels |= known[bare(name)]
    used = set(re.findall(r"[{,]\s*([a-z]+)(?:=~|!~|!=|=)", expression))
    used |= {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
    assert used <= labels


def test_a_counter_is_named_with_its_total_and_a_spread_by_its_buckets() -> None:
    for expression in (*alerts(), *panels()):
        for name in re.findall(r"rate\((ppd_[a-z_]+)", expression):
            assert SUFFIX.search(name), name


def parsed(argv: list[str]) -> dict[str, Any]:
    """The flags of a `ppd` command line; click.UsageError for one that it would refuse."""
    with click.Context(main) as context:
        command = main.get_command(context, argv[0])
    assert command is not None, argv[0]
    with command.make_context(argv[0], argv[1:]) as made:
        flags: dict[str, Any] = made.params
        return flags


def test_the_compose_fleet_is_the_one_that_its_proxy_is_told_of() -> None:
    services = COMPOSE["services"]
    config = build(DEPLOY / "ppd.toml", {})
    workers = {}
    for name, service in services.items():
        if service["image"] != "ppd":
            continue
        flags = parsed(service["command"])
        if name == "proxy":
            assert flags["config_path"] == Path("/etc/ppd/ppd.toml")
        else:
            workers[name] = f"{flags['role']}={name}:{flags['port']}"
            assert flags["role"] == "R" or flags["side_channel_host"] == name, "peers pull from it by this name"
            assert f":{flags['port']}/health" in " ".join(service["healthcheck"]["test"])
    assert config.workers == tuple(workers.values())
    assert f"127.0.0.1:{config.port}:{config.port}" in services["proxy"]["ports"]
    assert int(services["proxy"]["stop_grace_period"].removesuffix("s")) > config.shutdown_timeout_s


def test_prometheus_asks_every_program_of_the_compose_file() -> None:
    config = build(DEPLOY / "ppd.toml", {})
    jobs = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    asked = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    assert asked["ppd"] == [f"proxy:{config.port}"]
    assert asked["engines"] == [worker.partition("=")[2] for worker in config.workers]


def test_files_that_containers_are_given_exist_and_ports_are_this_machines_alone() -> None:
    for name, service in COMPOSE["services"].items():
        for volume in service.get("volumes", []):
            assert (DEPLOY / volume.split(":")[0]).is_file(), f"{name}: {volume}"
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert re.search(r":v?\d|^ppd$", service["image"]), f"{name}: an image without a version"


def mounted(name: str) -> dict[Path, Path]:
    """The files that a container is given: where they lie there -> where they lie here."""
    pairs = (volume.split(":")[:2] for volume in COMPOSE["services"][name]["volumes"])
    return {Path(there): DEPLOY / here for here, there in pairs}


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    files = mounted("grafana")
    (source,) = yaml.safe_load(files[PROVISIONING / "datasources/ppd.yaml"].read_text())["datasources"]
    (provider,) = yaml.safe_load(files[PROVISIONING / "dashboards/ppd.yaml"].read_text())["providers"]
    assert files[Path(provider["options"]["path"]) / "ppd.json"] == DEPLOY / "grafana/ppd.json"
    port = COMPOSE["services"]["prometheus"]["ports"][0].rpartition(":")[2]
    assert source["url"] == f"http://prometheus:{port}"
    variables = DASHBOARD["templating"]["list"]
    asked = [one["datasource"] for one in (*DASHBOARD["panels"], *variables)]
    assert all(one == {"type": source["type"], "uid": source["uid"]} for one in asked)
    assert {f"${one['name']}" for one in variables} >= set(re.findall(r"\$(?!__)\w+", " ".join(panels())))


def test_prometheus_finds_its_rules() -> None:
    files = mounted("prometheus")
    config = Path("/etc/prometheus/prometheus.yml")  # the image's default
    rules = yaml.safe_load(files[config].read_text())["rule_files"]
    assert [files[config.parent / rule] for rule in rules] == [DEPLOY / "alerts.yaml"]


def test_panels_have_room_of_their_own_and_no_name_twice() -> None:
    places = [set(product(*cells(panel["gridPos"]))) for panel in DASHBOARD["panels"]]
    assert sum(map(len, places)) == len(set().union(*places)), "some overlap"
    for what in ("id", "title"):
        assert len({panel[what] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def cells(place: dict[str, int]) -> tuple[range, range]:
    assert place["x"] >= 0 and place["x"] + place["w"] <= 24
    return range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])


def test_the_image_has_every_package_and_does_not_run_as_root() -> None:
    build_stage, _, final = DOCKERFILE.partition("AS build")[2].partition("\nFROM ")
    assert re.search(r"^RUN apt-get .*\bgcc\b.*\blibc6-dev\b", build_stage, re.M), "compiles what moves the bytes"
    copied = {part for line in re.findall(r"^COPY (.+)$", build_stage, re.M) for part in line.split()[:-1]}
    assert all((ROOT / path).exists() for path in copied)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert copied >= {*settings["tool"]["setuptools"]["package-dir"].values(), settings["project"]["readme"], "typings"}
    let_in = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    assert {f"!{path}" for path in copied} <= set(let_in)
    (user,) = re.findall(r"^USER (\d+):", final, re.M)
    assert int(user) > 0
    entry, default = (json.loads(re.findall(rf"^{what} (.+)$", final, re.M)[0]) for what in ("ENTRYPOINT", "CMD"))
    assert entry == ["ppd"] and parsed(default)["host"] == "0.0.0.0"
    (health,) = re.findall(r"^HEALTHCHECK .*CMD (\[.+\])$", final, re.M)
    assert f"http://127.0.0.1:{ProxyConfig().port}/health" in json.loads(health)[-1]


def test_the_systemd_unit_starts_the_proxy_and_waits_longer_than_it_drains() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "ppd.service")
    service = unit["Service"]
    program, *argv = service["ExecStart"].split()
    assert program.endswith("/ppd") and parsed(argv)["config_path"] == Path("/etc/ppd/ppd.toml")
    assert int(service["TimeoutStopSec"]) > ProxyConfig().shutdown_timeout_s
    assert service["DynamicUser"] == "yes"


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("no systemd-analyze")
    unit = tmp_path / "ppd.service"
    unit.write_text((DEPLOY / "ppd.service").read_text().replace("/opt/ppd/bin/ppd", "/bin/true"))  # it must be there
    done = subprocess.run([verify, "verify", str(unit)], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if unit.name in line] == []
