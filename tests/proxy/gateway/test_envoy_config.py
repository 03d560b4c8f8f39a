"""What Envoy is told. That a real one takes it and serves by it: tests/e2e/gateway/test_envoy.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from click.testing import CliRunner, Result

from ppd.proxy.cli.envoy_config import command
from ppd.proxy.cli.picker import command as picker
from ppd.proxy.openai.request import Endpoint
from tests.support.credentials import Authority


def asked(tmp_path: Path, toml: str, *flags: str) -> Result:
    config = tmp_path / "ppd.toml"
    config.write_text(toml)
    return CliRunner().invoke(command, ["--config", str(config), *flags])


def parsed(result: Result) -> tuple[Any, dict[str, Any], Any]:
    """Routes, clusters, and the filter that asks the picker."""
    assert result.exit_code == 0, result.output
    resources = yaml.safe_load(result.output)["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    return routes, {each["name"]: each for each in resources["clusters"]}, manager["http_filters"][0]["typed_config"]


def socket_addresses(cluster: Any) -> list[tuple[str, int]]:
    endpoints = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    found = [each["endpoint"]["address"]["socket_address"] for each in endpoints]
    return [(each["address"], each["port_value"]) for each in found]


def test_turns_go_where_the_picker_says_and_all_else_to_its_proxy(tmp_path: Path) -> None:
    result = asked(tmp_path, 'picker_port = 9002\npicker_host = "10.0.0.1"\nhost = "0.0.0.0"\nqueue_timeout_s = 7')
    routes, clusters, asks = parsed(result)
    *turns, rest = routes
    assert [(one["match"]["path"], one["route"]["cluster"]) for one in turns] == [(each, "picked") for each in Endpoint]
    assert (rest["match"]["prefix"], rest["route"]["cluster"]) == ("/", "ppd")
    assert socket_addresses(clusters["picker"]) == [("10.0.0.1", 9002)]
    assert socket_addresses(clusters["ppd"]) == [("127.0.0.1", 10001)]
    assert asks["message_timeout"] == "12s"
    assert "admin" not in yaml.safe_load(result.output)
    modes = asks["processing_mode"]
    assert [modes[f"request_{part}_mode"] for part in ("body", "trailer")] == ["BUFFERED", "SEND"]
    assert modes["response_body_mode"] == "NONE"


def test_workers_in_a_file_are_asked_in_the_pickers_order(tmp_path: Path) -> None:
    toml = 'picker_port = 9002\npicker_fallbacks = 2\npicker_workers_file = "/run/ppd workers.json"'
    (turn, *_), clusters, _ = parsed(asked(tmp_path, toml))
    assert turn["route"]["retry_policy"]["num_retries"] == 2
    assert (
        clusters["picked"]["eds_cluster_config"]["eds_config"]["path_config_source"]["path"] == "/run/ppd workers.json"
    )
    (turn, *_), clusters, _ = parsed(asked(tmp_path, "picker_port = 9002"))
    assert ("retry_policy" in turn["route"], clusters["picked"]["type"]) == (False, "ORIGINAL_DST")


def test_what_flags_change(tmp_path: Path) -> None:
    flags = (
        "--picker",
        "10.0.0.1:9",
        "--picker",
        "[fd00::1]:9",
        "--admin-port",
        "9901",
        "--answers",
        "--stream-bodies",
        "--listen",
        "[::]:80",
    )
    result = asked(tmp_path, "", *flags)
    _, clusters, asks = parsed(result)
    assert socket_addresses(clusters["picker"]) == [("10.0.0.1", 9), ("fd00::1", 9)]
    modes = asks["processing_mode"]
    assert (modes["response_body_mode"], modes["request_body_mode"]) == ("STREAMED", "FULL_DUPLEX_STREAMED")
    whole = yaml.safe_load(result.output)
    assert whole["admin"]["address"]["socket_address"]["port_value"] == 9901
    assert whole["static_resources"]["listeners"][0]["address"]["socket_address"] == {"address": "::", "port_value": 80}


def test_tls_is_spoken_where_the_config_has_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("own")
    files = f'tls_cert_file = "{own.cert}"\ntls_key_file = "{own.key}"\npicker_port = 9002\n'
    listener, clusters = secured(asked(tmp_path, files))
    chain = {"certificate_chain": {"filename": own.cert}, "private_key": {"filename": own.key}}
    assert listener["tls_certificates"] == [chain]
    assert clusters["ppd"]["validation_context"]["trusted_ca"] == {"filename": own.cert}
    assert "picked" not in clusters
    workers = 'workers = ["D=10.0.0.1:1,tls=true", "R=[fd00::1]:1,tls=true", "P=10.0.0.3:1"]\n'
    workers += f'worker_ca_file = "{authority.ca}"\n'
    _, clusters = secured(asked(tmp_path, files + workers))
    names = clusters["picked"]["validation_context"]["match_typed_subject_alt_names"]
    assert [each["matcher"]["exact"] for each in names] == ["10.0.0.1", "fd00::1"]
    assert secured(asked(tmp_path, "picker_port = 9002")) == (None, {})


def secured(result: Result) -> tuple[Any, dict[str, Any]]:
    """The TLS context of the listener, and those of clusters."""
    _, clusters, _ = parsed(result)
    chain = yaml.safe_load(result.output)["static_resources"]["listeners"][0]["filter_chains"][0]
    found = {name: each["transport_socket"] for name, each in clusters.items() if "transport_socket" in each}
    own = chain["transport_socket"]["typed_config"]["common_tls_context"] if "transport_socket" in chain else None
    return own, {name: each["typed_config"]["common_tls_context"] for name, each in found.items()}


def test_a_proxy_that_asks_for_certificates_needs_one_for_envoy(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("own")
    files = f'tls_cert_file = "{own.cert}"\ntls_key_file = "{own.key}"\ntls_client_ca_file = "{authority.ca}"\n'
    refused = asked(tmp_path, files + "picker_port = 9002")
    assert refused.exit_code != 0
    assert "tls_client_ca_file: the proxy's port asks Envoy for a certificate too" in refused.output
    shown = f'worker_cert_file = "{own.cert}"\nworker_key_file = "{own.key}"\n'
    _, clusters = secured(asked(tmp_path, files + shown + "picker_port = 9002"))
    assert clusters["ppd"]["tls_certificates"][0]["certificate_chain"] == {"filename": own.cert}


@pytest.mark.parametrize(
    ("toml", "flags", "told"),
    [
        ("", (), "no picker is known: give --picker HOST:PORT, or a --config with picker_port"),
        ("", ("--picker", "10.0.0.1"), "10.0.0.1 is not HOST:PORT, with a port from 1 to 65535"),
        ("", ("--picker", "a:65536"), "a:65536 is not HOST:PORT"),
        ("", ("--picker", "a:" + "9" * 5000), "9 is not HOST:PORT"),
        ("", ("--picker", "a:²"), "a:² is not HOST:PORT"),
        ("picker_prot = 1", (), "picker_prot"),
        ("picker_port = 9\npicker_fallbacks = 1", (), "so it needs picker_workers_file too"),
        (
            'picker_port = 9\nworkers = ["D=10.0.0.1:1,tls=true"]',
            (),
            "worker_ca_file: is needed, as D=10.0.0.1:1 speaks TLS",
        ),
        (
            'worker_ca_file = "{ca}"\nworkers = ["D=10.0.0.1:1,tls=true", "R=10.0.0.2:1", "P=10.0.0.3:1"]',
            ("--picker", "a:9"),
            "workers: D=10.0.0.1:1 with TLS, R=10.0.0.2:1 without",
        ),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, toml: str, flags: tuple[str, ...], told: str) -> None:
    result = asked(tmp_path, toml.replace("{ca}", Authority(tmp_path).ca), *flags)
    assert result.exit_code != 0
    assert told in result.output


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), "a picker needs --listen HOST:PORT, or a --config with picker_port"),
        (("--listen", "10.0.0.1:1", "--health", "10.0.0.2:2"), "must be on the host of --listen, 10.0.0.1"),
        (("--listen", ":1"), ":1 is not HOST:PORT"),
        (("--listen", "10.0.0.1:1", "--processes", "0"), "0 is not in the range"),
    ],
)
def test_a_picker_is_told_where_to_listen(flags: tuple[str, ...], told: str) -> None:
    result = CliRunner().invoke(picker, [*flags])
    assert result.exit_code != 0
    assert told in result.output
