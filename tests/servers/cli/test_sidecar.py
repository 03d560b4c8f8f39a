"""The flags of `ppd sidecar`: what they become, and what they refuse."""

from __future__ import annotations

import click
import pytest

from ppd.proxy.errors import PPDError
from ppd.proxy.fleet.worker import Role
from ppd.servers.cli import sidecar as flags
from ppd.servers.sidecar.allow_list import Allowed
from ppd.servers.sidecar.failed_legs import FailurePolicy, OnFailure
from ppd.servers.sidecar.sidecar import SidecarOptions

NEEDED = ("--engine", "https://127.0.0.1:8200", "--listen", "[::1]:8000")


def options(*given: str) -> SidecarOptions:
    return flags.options_of(flags.command.make_context("sidecar", [*NEEDED, *given]).params)


def test_nobody_may_be_named_and_the_first_p_is_taken_unless_flags_say_otherwise() -> None:
    made = options()
    assert made.allow_list.allowed == made.encoder_list.allowed == Allowed()
    assert (made.sample_prefill, made.prefill_tls, made.encoder_tls) == (False, False, False)


def test_flags_become_the_options_of_a_sidecar() -> None:
    allowed = ("--allow-prefill", "10.0.0.0/24", "--allow-prefill", "p:1", "--allow-encoder", "10.0.1.0/24,e:1")
    named = ("--sample-prefill", "--prefill-tls", "--encoder-tls", "--encoder-batch", "4")
    made = options(*allowed, *named, "--on-prefill-failure", "retry", "--prefill-retries", "2", "--idle-timeout-s", "5")
    assert (made.config.host, made.config.port, made.config.idle_timeout_s) == ("::1", 8000, 5.0)
    assert (made.engine, made.engine_tls, made.connector) == ("127.0.0.1:8200", True, "nixl")
    assert made.allow_list.allowed == Allowed.of(["10.0.0.0/24", "p:1"])
    assert made.encoder_list.allowed == Allowed.of(["10.0.1.0/24", "e:1"])
    assert (made.sample_prefill, made.prefill_tls, made.encoder_tls, made.config.encoder_batch) == (True, True, True, 4)
    assert made.policy == FailurePolicy(OnFailure.RETRY, 2)


@pytest.mark.parametrize(("given", "role"), [((), Role.DECODE), (("--role", "R"), Role.REPLICA)])
def test_an_engine_is_a_d_unless_a_flag_says_otherwise(given: tuple[str, ...], role: Role) -> None:
    assert options(*given).role is role


def test_flags_say_what_the_connector_must_know() -> None:
    given = ("--prefill", "P:1,engine_id=a", "--prefill", "10.0.0.5:8100,engine_id=b,pp_size=2")
    made = options("--connector", "nixl_push", *given)
    assert made.prefills == {"p:1": {"engine_id": "a"}, "10.0.0.5:8100": {"engine_id": "b", "pp_size": "2"}}
    made = options("--connector", "p2p_nccl", "--coordinate", "zmq_address=10.0.0.6:21001")
    assert (made.coordinates, made.prefills) == ({"zmq_address": "10.0.0.6:21001"}, {})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--engine", "ftp://h:1"), "engine = 'ftp://h:1': must be http://host:port or https://host:port"),
        (("--engine", "http://h"), "engine = 'h': must be host:port"),
        (("--listen", "8000"), "listen = '8000': must be host:port"),
        (("--allow-prefill", "10.0.0.1/24"), "allow_prefill = '10.0.0.1/24': must be address ranges"),
        (("--allow-encoder", "10.0.0.1/24"), "allow_encoder = '10.0.0.1/24': must be address ranges"),
        (("--prefill-retries", "1"), "prefill_retries = 1: must be at least 1 with --on-prefill-failure retry"),
        (("--connector", "mooncake"), "its P tells D's leg only when it is asked, and a sidecar asks nobody"),
        (("--connector", "trtllm_gen_first"), "only when it is asked"),
        (("--connector", "p2p_nccl"), "coordinate: p2p_nccl must know zmq_address"),
        (("--connector", "nixl_push", "--prefill", "p:1"), "prefill: nixl_push must know engine_id"),
        (("--connector", "nixl_push", "--prefill", "p,engine_id=e"), "prefill = 'p': must be host:port"),
        (("--connector", "nixl_push", "--prefill", "p:1,engine_id"), "prefill = engine_id: must be NAME=VALUE"),
        (
            ("--connector", "nixl_push", "--prefill", "p:1,engine_id=e,tp_size=x"),
            "prefill: tp_size = x: must be a number",
        ),
        (
            ("--connector", "sglang", "--coordinate", "x=1"),
            "coordinate = x=1: must be of bootstrap_host, bootstrap_port",
        ),
        (("--connector", "sglang", "--coordinate", "=x"), "coordinate = =x: must be NAME=VALUE"),
        (("--idle-timeout-s", "0"), "idle_timeout_s = '0'"),
        (("--tls-cert-file", "/no/such", "--tls-key-file", "/no/such"), "tls_cert_file = '/no/such': must be"),
        (("--worker-ca-file", "/no/such"), "worker_ca_file = '/no/such': must be"),
    ],
)
def test_what_cannot_be_used_is_refused_at_the_start(given: tuple[str, ...], told: str) -> None:
    with pytest.raises((PPDError, click.BadParameter)) as refused:
        options(*given)
    assert told in str(refused.value)


def test_help_speaks_of_a_sidecar_where_the_proxys_own_would_mislead() -> None:
    told = " ".join(flags.command.get_help(click.Context(flags.command)).split())
    assert "Sent to the engine, and to each P and E; if empty, the client's own Authorization is." in told
    for foreign in ("keys_file", "that a stranger may have announced", "that the proxy shows"):
        assert foreign not in told
