"""The doctor on real fleets: simulated engines and the proxy in this process, the command in a thread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from ppd.proxy.cli.doctor import probe
from ppd.proxy.cli.doctor.command import command
from ppd.proxy.config import Mode
from ppd.proxy.fleet.worker import Role
from ppd.proxy.policy import Route
from ppd.servers.fleet.ports import free_ports
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.core.counters import Trap
from ppd.servers.sim.core.fault_orders import Faults
from ppd.servers.sim.launch import running_engine
from tests.e2e.failures.fleet import FaultFleet
from tests.e2e.fleet.connector_fleets import NAMES, ConnectorFleet

pytestmark = pytest.mark.e2e
ADMIN_KEY = "operator"  # what `start_fleet` sets
StartProxy = Callable[..., AbstractAsyncContextManager[str]]


@dataclass(frozen=True, slots=True)
class Report:
    """What `ppd doctor --json` said."""

    code: int
    document: dict[str, Any]

    def levels(self, check: str) -> list[str]:
        return [finding["level"] for finding in self.document["findings"] if finding["check"] == check]

    def messages(self, check: str) -> str:
        return "\n".join(finding["message"] for finding in self.document["findings"] if finding["check"] == check)

    def bad(self) -> dict[str, str]:
        """Checks that warned or failed."""
        findings = self.document["findings"]
        return {finding["check"]: finding["level"] for finding in findings if finding["level"] in ("WARN", "FAIL")}

    def counts(self, name: str) -> dict[str, int]:
        (counts,) = [entry["counts"] for entry in self.document["workers"] if entry["name"] == name]
        assert isinstance(counts, dict)
        return counts


async def run(*arguments: str) -> Result:
    """The command as a user runs it, beside this loop, on which fleet and proxy run."""
    return await asyncio.to_thread(CliRunner(env={"COLUMNS": "200"}).invoke, command, list(arguments))


async def diagnose(*arguments: str) -> Report:
    result = await run(*arguments, "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Report(result.exit_code, json.loads(result.stdout))


@asynccontextmanager
async def engines(*configs: SimConfig, options: str = "") -> AsyncIterator[tuple[str, ...]]:
    """Running engines, as static workers of a config."""
    async with AsyncExitStack() as stack:
        started = [await stack.enter_async_context(running_engine(config)) for config in configs]
        yield tuple(f"{engine.config.role}={engine.address}{options}" for engine in started)


@pytest.fixture
def start_proxy(start_fleet: Callable[..., Any]) -> StartProxy:
    """The URL of a proxy that has found these workers healthy."""

    @asynccontextmanager
    async def start(workers: tuple[str, ...], **settings: Any) -> AsyncIterator[str]:
        async with start_fleet("", workers=workers, **settings) as fleet:
            await fleet.until(lambda: all(view.up for view in fleet.proxy.state.registry.views()))
            yield fleet.base_url

    return start


@asynccontextmanager
async def old_prefill_engine(version: str) -> AsyncIterator[str]:
    """A P that tells another version; nothing else is ever asked of it."""
    answers: dict[str, dict[str, Any] | None] = {
        "/health": None,
        "/metrics": None,
        "/version": {"version": version},
        "/v1/models": {"object": "list", "data": [{"id": "sim", "object": "model"}]},
    }

    async def answer(request: web.Request) -> web.StreamResponse:
        body = answers[request.path]
        return web.Response() if body is None else web.json_response(body)

    app = web.Application()
    for path in answers:
        app.router.add_get(path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"P=127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


P, D, R, _ = (SimConfig(role=role) for role in Role)
WITH_KEY = ("--admin-key", ADMIN_KEY)


async def test_a_healthy_fleet_passes_every_check(start_proxy: StartProxy) -> None:
    async with engines(P, D, D, R) as workers, start_proxy(workers) as url:
        report = await diagnose("--proxy", url, *WITH_KEY)
    assert (report.code, report.bad()) == (0, {}), report.document
    for check in ("proxy", "ready", "admin API", "workers", "ways to serve", "versions", "connectors", "models"):
        assert report.levels(check) == ["OK"], check
    assert report.levels("handoff") == report.levels("prefix cache") == report.levels("prefill") == ["OK"]
    assert "SPLIT on P1 -> D" in report.messages("turn 1")
    assert "LOCAL on D" in report.messages("turn 2")
    decode = report.messages("turn 2").split()[2]
    assert report.counts("P1")["computed"] >= 1400
    assert report.counts(decode)["transferred"] >= 1400
    assert report.counts(decode)["local_hits"] >= 1300
    assert report.counts("R1") == {"computed": 0, "local_hits": 0, "transferred": 0, "expired": 0, "failed": 0}


@pytest.mark.parametrize(("key", "levels"), [(WITH_KEY, ["OK"]), ((), ["SKIP"])])
async def test_a_handoff_is_checked_where_the_mode_splits_nothing(
    start_proxy: StartProxy, key: tuple[str, ...], levels: list[str]
) -> None:
    """In mode slo an idle D computes a short prompt itself; who holds the admin key may force the route."""
    settings = {"mode": Mode.SLO, "profile": "h100-llama-3.1-8b"}
    async with engines(P, D) as workers, start_proxy(workers, **settings) as url:
        report = await diagnose("--proxy", url, *key)
    assert {turn["route"] for turn in report.document["conversation"]["turns"]} == {"LOCAL"}
    assert report.levels("handoff") == levels, report.document
    assert not key or "came from P1" in report.messages("handoff")


async def test_two_runs_do_not_warm_each_others_caches(start_proxy: StartProxy) -> None:
    async with engines(P, D) as workers, start_proxy(workers) as url:
        reports = [await diagnose("--proxy", url, *WITH_KEY) for _ in range(2)]
    assert [report.bad() for report in reports] == [{}, {}]
    assert [report.counts("P1")["local_hits"] < 100 for report in reports] == [True, True]


async def test_the_report_for_people_says_the_same_and_no_key(start_proxy: StartProxy) -> None:
    async with engines(P, D) as workers, start_proxy(workers) as url:
        result = await run("--proxy", url, *WITH_KEY, "--client-key", "client-secret-2")
    assert result.exit_code == 0, result.output
    shown = result.output.splitlines()
    assert any(line.startswith(("✓ OK", "+ OK")) and "handoff" in line for line in shown)
    assert any(line.startswith("D1 ") and "0.33.0" in line for line in shown)
    assert "client-secret-2" not in result.output
    assert ADMIN_KEY not in result.output


async def test_follow_ups_that_are_split_are_judged_by_what_moved(start_proxy: StartProxy) -> None:
    async with engines(P, D) as workers, start_proxy(workers, mode=Mode.ALWAYS_SPLIT) as url:
        report = await diagnose("--proxy", url, *WITH_KEY)
    assert report.bad() == {}, report.document
    assert report.levels("handoff") == ["OK", "OK"]


async def test_a_fleet_of_replicas_hands_nothing_over(start_proxy: StartProxy) -> None:
    async with engines(R) as workers, start_proxy(workers) as url:
        report = await diagnose("--proxy", url, *WITH_KEY)
    assert report.bad() == {}, report.document
    assert report.levels("handoff") == ["SKIP"]
    assert report.levels("prefix cache") == ["OK"]


async def test_versions_that_differ_fail(start_proxy: StartProxy) -> None:
    async with engines(D) as workers, old_prefill_engine("0.32.0") as old, start_proxy((*workers, old)) as url:
        report = await diagnose("--proxy", url, *WITH_KEY)
    assert report.code == 1
    assert report.bad() == {"versions": "FAIL", "ways to serve": "FAIL"}, report.document
    assert "P1 0.32.0, D1 0.33.0" in report.messages("versions")
    assert report.levels("handoff") == ["SKIP"]


async def test_a_handoff_that_moves_nothing_fails(start_proxy: StartProxy) -> None:
    async with engines(P, D, options=",connector=none") as workers, start_proxy(workers) as url:
        report = await diagnose("--proxy", url, *WITH_KEY)
    assert (report.code, report.bad()) == (1, {"handoff": "FAIL"}), report.document
    assert "D1 pulled nothing" in report.messages("handoff")


async def test_a_cache_that_never_hits_fails(start_proxy: StartProxy) -> None:
    blocks_never_full = SimConfig(role=Role.REPLICA, block_size=16_384, num_blocks=4)
    async with engines(blocks_never_full) as workers, start_proxy(workers) as url:
        report = await diagnose("--proxy", url, *WITH_KEY)
    assert (report.code, report.bad()) == (1, {"prefix cache": "FAIL"}), report.document


@pytest.mark.parametrize(("configured", "level", "code"), [("", "WARN", 0), ("another", "FAIL", 1)])
async def test_without_the_admin_api_the_conversation_is_held_all_the_same(
    configured: str, level: str, code: int, start_proxy: StartProxy
) -> None:
    async with engines(P, D) as workers, start_proxy(workers, admin_key=configured) as url:
        report = await diagnose("--proxy", url, *WITH_KEY)
    assert (report.levels("admin API"), report.code) == ([level], code)
    assert (report.levels("turn 1"), report.levels("turn 2")) == (["OK"], ["OK"])
    assert report.levels("workers") == report.levels("handoff") == ["SKIP"]


async def test_an_encoder_is_asked_for_an_image(start_proxy: StartProxy) -> None:
    encoder, replica = SimConfig(role=Role.ENCODE), SimConfig(role=Role.REPLICA)
    async with engines(encoder, replica) as workers, start_proxy(workers) as url:
        report = await diagnose("--proxy", url, *WITH_KEY)
    assert (report.levels("encoding"), report.bad()) == (["OK"], {}), report.document
    assert "E1 encoded an image" in report.messages("encoding")


async def test_a_model_that_nobody_serves_fails(start_proxy: StartProxy) -> None:
    async with engines(P, D) as workers, start_proxy(workers) as url:
        report = await diagnose("--proxy", url, *WITH_KEY, "--model", "other")
    assert report.code == 1
    assert report.levels("turn 1") == ["FAIL"]


async def test_no_proxy_there_fails_at_once() -> None:
    report = await diagnose("--proxy", f"127.0.0.1:{free_ports(1)[0]}", *WITH_KEY)
    assert (report.code, report.bad()) == (1, {"proxy": "FAIL"})


async def test_a_config_is_checked_with_its_workers(tmp_path: Path) -> None:
    file = tmp_path / "ppd.toml"
    async with engines(P, D) as workers:
        nobody, port, heartbeat_port = free_ports(3)
        gone = f"R=127.0.0.1:{nobody}"
        ports = f"port = {port}\nheartbeat_port = {heartbeat_port}\n"
        file.write_text(f"{ports}admin_key = '{ADMIN_KEY}'\nworkers = {list(workers)}\n")
        good = await diagnose("--config", str(file))
        file.write_text(file.read_text().replace(f"{list(workers)}", f"{[*workers, gone]}"))
        bad = await diagnose("--config", str(file))
    assert (good.code, good.bad()) == (0, {}), good.document
    assert good.levels("versions") == good.levels("models") == good.levels("workers") == ["OK"]
    assert (bad.code, bad.bad()) == (1, {"workers": "FAIL"})
    assert "R1" in bad.messages("workers")


async def test_engines_other_than_vllms_say_where_they_keep_nothing(tmp_path: Path) -> None:
    file = tmp_path / "ppd.toml"
    sglang, trtllm = (SimConfig(role=Role.DECODE, connector=name) for name in ("sglang", "trtllm"))
    async with engines(sglang, options=",engine=sglang") as one, engines(trtllm, options=",engine=trtllm") as other:
        file.write_text(f"port = 0\nheartbeat_port = 0\nworkers = {[*one, *other]}\n")
        report = await diagnose("--config", str(file))
    assert report.levels("prefixes on D") == ["WARN", "SKIP"]
    assert "D1 has no radix cache" in report.messages("prefixes on D")
    assert "D2 does not tell" in report.messages("prefixes on D")


BAD = {  # checks that warn or fail where all is well, with what they say
    "sglang": {"prefixes on D": ("WARN", "no radix cache")},
    "trtllm": {"prefixes on D": ("WARN", "reuses no blocks")},
    "none": {"handoff": ("FAIL", "pulled nothing")},
    "p2p_nccl": {"LOCAL turns": ("WARN", "gets no LOCAL turns")},
}


@pytest.mark.parametrize("connector", NAMES)
async def test_what_a_healthy_fleet_of_each_connector_is_told(connector: str) -> None:
    async with AsyncExitStack() as stack:
        told = {"trtllm": ",prefix_cache=false"}
        fleet = await ConnectorFleet.start(stack, connector, "P1 D1", mode=Mode.TABLE, told=told)
        report = await diagnose("--proxy", fleet.field.base_url, *WITH_KEY)
    bad = report.bad()
    if connector == "lmcache":  # whose P may answer before its KV is there
        assert bad.pop("handoff", "WARN") == "WARN"
    expected = BAD.get(connector, {})
    assert bad == {check: level for check, (level, _) in expected.items()}, report.document["findings"]
    assert all(words in report.messages(check) for check, (_, words) in expected.items())
    assert report.levels("turn 1") == report.levels("turn 2") == ["OK"]


@pytest.mark.parametrize(
    ("on_p", "on_d", "level", "words"),
    [
        (True, True, "OK", "P1 read back"),
        (False, True, "FAIL", "P1 did not read back from D1: no answer in 1 s"),  # it hangs
        (True, False, "WARN", "D1 told no handle"),
    ],
)
async def test_a_p_that_only_says_that_it_reads_back_is_found(
    on_p: bool, on_d: bool, level: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "READ_BACK_S", 1.0 if not on_p else 60.0)
    async with FaultFleet.of("") as field:
        for name, has_it in (("P1", on_p), ("D1", on_d)):
            await field.add(name, options=",bidirectional_kv_xfer=true", bidirectional_kv_xfer=has_it)
        report = await diagnose("--proxy", field.base_url, *WITH_KEY)
        for engine in field.engines.values():
            engine.faults = Faults()  # what hangs may end
            del engine.counters.traps[Trap.NOT_BIDIRECTIONAL]
    assert report.levels("readback") == [level]
    assert words in report.messages("readback")


@asynccontextmanager
async def restarting(before: str, after: str) -> AsyncIterator[str]:
    """One address, behind which another proxy is from the first turn on that reads back; after: empty for none."""
    target = before

    async def forward(request: web.Request) -> web.StreamResponse:
        nonlocal target
        target = after if request.headers.get("X-PPD-Force-Route") == Route.READBACK else target
        if not target:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        body, kept = await request.read(), {"x-admin-key", "x-session-id", "x-ppd-force-route", "content-type"}
        headers = {name: value for name, value in request.headers.items() if name.lower() in kept}
        async with session.request(request.method, target + request.path_qs, data=body, headers=headers) as answer:
            shown = {name: value for name, value in answer.headers.items() if name.lower().startswith("x-")}
            return web.Response(status=answer.status, body=await answer.read(), headers=shown)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as session:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(("is_back", "words"), [(True, "it has restarted"), (False, "was not answered")])
async def test_a_proxy_that_restarts_meanwhile_is_no_fault_of_workers(
    start_proxy: StartProxy, is_back: bool, words: str
) -> None:
    able = [SimConfig(role=role, bidirectional_kv_xfer=True) for role in (Role.PREFILL, Role.DECODE, Role.ENCODE)]
    options = ",bidirectional_kv_xfer=true"
    async with engines(*able[:2], options=options) as two, engines(able[2]) as encoder:
        workers = (*two, *encoder)
        async with (
            start_proxy(workers) as before,
            start_proxy(workers) as after,
            restarting(before, after if is_back else "") as url,
        ):
            report = await diagnose("--proxy", url, *WITH_KEY)
    assert (report.levels("readback"), report.bad()) == (["SKIP"], {}), report.document
    assert words in report.messages("readback")
    assert report.levels("encoding") == ["OK"]  # E is asked from here
