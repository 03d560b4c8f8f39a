"""The load generator against simulated engines, alone and behind the proxy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from ppd.offline.bench.results import decode
from ppd.offline.cli.bench import command
from ppd.offline.experiment.records import Record
from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.load.measure import measure
from ppd.offline.load.player import Progress
from ppd.offline.load.target import Api, Target
from ppd.proxy.config import Mode
from ppd.proxy.errors import ConfigError
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.core.fault_orders import Faults
from ppd.servers.sim.engine.engine import SimEngine
from ppd.servers.sim.launch import running_engine

SAMPLES = Path(__file__).parents[2] / "data"


def run_of(first: tuple[int, int] = (128, 32), later: tuple[int, int] = (40, 16), **changes: Any) -> Run:
    """Twelve conversations or so of three turns, in a second."""
    shape: dict[str, Any] = {"turns": 3} | changes.pop("workload", {})
    workload = Workload(
        first=Profile(name="first", new_tokens=first[0], output_tokens=first[1]),
        later=Profile(name="later", new_tokens=later[0], output_tokens=later[1]),
        **shape,
    )
    usual: dict[str, Any] = {"topology": "1P_2D", "x": 1.0, "qps": 12.0, "seconds": 1.0, "workload": workload}
    return Run(**(usual | changes))


def of_turn(records: tuple[Record, ...], turn: int) -> list[Record]:
    return [record for record in records if record.turn == turn]


@asynccontextmanager
async def engine_alone(**settings: Any) -> AsyncIterator[tuple[SimEngine, Target]]:
    async with running_engine(SimConfig(keep_requests=1000, **settings)) as engine:
        yield engine, Target(url=f"http://{engine.address}", model="sim")


@pytest.mark.parametrize("api", list(Api))
async def test_every_prompt_has_exactly_the_planned_tokens_and_turns_stay_in_their_session(
    start_fleet: Any, api: Api
) -> None:
    async with start_fleet("P1 D1 D2", mode=Mode.ALWAYS_LOCAL) as fleet:
        records = await measure(run_of(), Target(url=fleet.base_url, model="sim", api=api))
        counted = sum(fleet.engines[name].counters.prompt_tokens for name in ("D1", "D2"))
    assert len(records) == 3 * len(of_turn(records, 1)) > 15
    assert {record.error for record in records} == {""}
    assert {record.prompt_tokens for record in of_turn(records, 1)} == {128}
    assert {record.prompt_tokens for record in of_turn(records, 2)} == {128 + 32 + 40}
    assert {record.prompt_tokens for record in of_turn(records, 3)} == {200 + 16 + 40}
    assert {record.output_tokens for record in of_turn(records, 1)} == {32}
    assert counted == sum(record.prompt_tokens for record in records)
    # Recognised as the same conversation, found where it is held, and nothing but its own history was held.
    assert {(record.route, record.cached_tokens) for record in of_turn(records, 1)} == {("SPLIT", 0)}
    assert {(record.route, record.cached_tokens) for record in of_turn(records, 2)} == {("LOCAL", 144)}
    assert {(record.route, record.cached_tokens) for record in of_turn(records, 3)} == {("LOCAL", 208)}
    homes = {record.conversation: record.decode for record in of_turn(records, 1)}
    assert all(record.decode == homes[record.conversation] for record in records)
    assert {record.prefill for record in of_turn(records, 1)} == {"P1"}


@pytest.mark.parametrize("api", list(Api))
async def test_a_shared_prefix_is_found_in_the_cache_and_nothing_else_is(api: Api) -> None:
    async with engine_alone() as (_, target):
        run = run_of(workload={"shared_prefix_tokens": 64, "turns": 1})
        first = await measure(run, Target(url=target.url, model="sim", api=api))
        again = await measure(run, Target(url=target.url, model="sim", api=api))
    for records in (first, again):  # the second run's words are new, its prefix too
        assert {record.cached_tokens for record in records} == {0, 64}
        assert (records[0].cached_tokens, records[-1].cached_tokens) == (0, 64)


async def test_times_are_in_order_and_from_the_planned_arrival() -> None:
    seen: list[Progress] = []
    async with engine_alone(time_scale=0.5) as (_, target):
        records = await measure(run_of(), target, progress=seen.append)
    for record in records:
        assert record.first_token_s is not None
        assert record.last_token_s is not None
        assert 0 <= record.scheduled_s <= record.sent_s < record.first_token_s < record.last_token_s
    ended = {(record.conversation, record.turn): record.last_token_s or 0.0 for record in records}
    assert all(
        record.scheduled_s >= ended[record.conversation, record.turn - 1] for record in records if record.turn > 1
    )
    assert [(record.conversation, record.turn) for record in records] == sorted(ended)
    assert (seen[-1].requests, seen[-1].done, seen[-1].failed, seen[-1].in_flight) == (len(records), len(records), 0, 0)


@pytest.mark.parametrize(
    ("faults", "status", "error"),
    [
        (Faults(refuse=1), 503, "status 503: Refused on request."),
        (Faults(garbage=1), 200, "the answer broke off"),
        (Faults(cut=1, cut_after_events=3), 200, "the connection broke: "),
        (Faults(hang=1), 0, "no whole answer within 2 s"),
    ],
)
async def test_a_failure_is_counted_with_the_turns_that_it_kept_from_being_sent(
    faults: Faults, status: int, error: str
) -> None:
    async with engine_alone() as (engine, target):
        engine.faults = faults
        records = await measure(run_of(), Target(url=target.url, model="sim", timeout_s=2.0))
    failed = [record for record in records if record.error]
    assert [record.turn for record in failed] == [1, 2, 3]
    assert failed[0].status == status
    assert failed[0].error.startswith(error)
    assert [record.error for record in failed[1:]] == ["not sent: turn 1 failed"] * 2
    assert [record.ttft_s for record in failed] == [None] * 3
    assert len(records) - len(failed) == 3 * (len(of_turn(records, 1)) - 1) > 0


async def test_a_server_that_is_gone_is_a_failure_of_every_request() -> None:
    async with engine_alone() as (_, target):
        pass
    records = await measure(run_of(), target)
    assert {record.status for record in records} == {0}
    assert {record.error for record in of_turn(records, 1)} == {"the connection broke: Connection refused"}


async def test_routes_are_forced_with_the_key_on_every_request() -> None:
    async with engine_alone() as (engine, target):
        forcing = Target(url=target.url, model="sim", forces_routes=True, admin_key="operator", api_key="client")
        records = await measure(run_of(), forcing)
        headers = [received.headers for received in engine.received]
    assert {one["X-Admin-Key"] for one in headers} == {"operator"}
    assert {one["Authorization"] for one in headers} == {"Bearer client"}
    assert sorted(one["X-PPD-Force-Route"] for one in headers) == sorted(record.route for record in records)
    assert {record.route for record in of_turn(records, 2)} == {"LOCAL"}


async def test_a_turn_that_chat_cannot_be_short_enough_for_is_refused_before_anything_is_sent() -> None:
    async with engine_alone() as (engine, target):
        with pytest.raises(ConfigError, match="of 16 new tokens cannot be sent as chat"):
            await measure(run_of(later=(16, 16)), Target(url=target.url, model="sim", api=Api.CHAT))
        assert not engine.received


async def test_a_server_that_counts_no_tokens_takes_ids_but_no_chat() -> None:
    async with engine_alone() as (engine, _), _without_tokenize(engine) as url:
        records = await measure(run_of(), Target(url=url, model="sim"))
        assert {record.prompt_tokens for record in of_turn(records, 2)} == {200}
        with pytest.raises(ConfigError, match=r"/tokenize: answered 404; give a tokenizer, or use the completions"):
            await measure(run_of(), Target(url=url, model="sim", api=Api.CHAT))


@asynccontextmanager
async def _without_tokenize(engine: SimEngine) -> AsyncIterator[str]:
    """The engine's completions and nothing else of it."""
    json = {"Content-Type": "application/json"}

    async def forward(request: web.Request) -> web.StreamResponse:
        url, body = f"http://{engine.address}{request.path}", await request.read()
        async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=json) as answer:
            response = web.StreamResponse(headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            return response

    app = web.Application()
    app.router.add_post("/v1/completions", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_run_that_is_cancelled_leaves_nothing_behind() -> None:
    async with engine_alone(time_scale=50) as (engine, target):
        before = asyncio.all_tasks()
        running = asyncio.create_task(measure(run_of(), target))
        async with asyncio.timeout(60):
            while len(engine.received) < 5:
                await asyncio.sleep(0.01)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        left = {task for task in asyncio.all_tasks() - before if "Player" in repr(task) or "measure" in repr(task)}
        assert left == set()


async def test_connections_can_be_capped_and_the_wait_is_in_the_ttft() -> None:
    async with engine_alone(time_scale=1.0) as (_, target):
        capped = Target(url=target.url, model="sim", connections=1)
        records = await measure(run_of(first=(32, 8), workload={"turns": 1}, qps=40.0, seconds=0.3), capped)
    spans = sorted((record.sent_s, record.last_token_s or 0.0) for record in records)
    assert all(sent_s >= ended_s for (sent_s, _), (_, ended_s) in zip(spans[1:], spans[:-1], strict=True))
    assert records[-1].sent_s - records[-1].scheduled_s > (records[0].last_token_s or 0.0) - records[0].sent_s
    assert all((record.ttft_s or 0.0) > record.sent_s - record.scheduled_s for record in records)


# -- ppd bench


@pytest.fixture
def bench() -> Callable[..., Any]:
    """The command, in a thread of its own, as it runs an event loop itself."""

    async def invoke(url: str, *flags: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, command, ["--url", url, *flags])

    return invoke


async def test_bench_shows_and_keeps_what_it_measured(start_fleet: Any, bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl.gz"
    flags = ("--first", "128:32", "--later", "40:16", "--qps", "30", "--max-conversations", "10", "--seed", "3")
    async with start_fleet("P1 D1", mode=Mode.ALWAYS_LOCAL) as fleet:
        result = await bench(f"{fleet.base_url}/v1", *flags, "--session-header", "X-Session-ID", "--output", str(path))
        named = {received.headers["X-Session-ID"] for received in fleet.engines["D1"].received}
    assert result.exit_code == 0, result.output
    assert len(named) == 10
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["requests", "10", "10", "20"] in rows
    assert ["failures", "0", "0", "0"] in rows
    assert ["routes", "SPLIT", "100%", "LOCAL", "100%", "LOCAL", "50%"] in rows
    kept = decode(path.read_bytes())
    assert (kept.workload, kept.seed, kept.origin.model) == ("128:32, then 1 x 40:16", 3, "sim")
    assert kept.pace == "open loop, 30 conversations a second"
    assert {record.prompt_tokens for record in kept.records} == {128, 200}


@pytest.mark.parametrize("file", ["conversations/mt-bench-101.jsonl", "traces/sharegpt.json"])
async def test_bench_plays_recorded_text_with_the_servers_own_answers(bench: Any, tmp_path: Path, file: str) -> None:
    path = tmp_path / "records.jsonl.gz"
    async with engine_alone() as (engine, target):
        result = await bench(
            target.url, "--conversations", str(SAMPLES / file), "--concurrency", "2", "--output", str(path)
        )
        asked = [msgspec.json.decode(received.body) for received in engine.received]
    assert result.exit_code == 0, result.output
    assert "failed" not in result.stdout.replace("Failed", "")
    kept = decode(path.read_bytes())
    assert kept.api == "chat"
    assert any(len(body["messages"]) > 2 for body in asked)
    for record in kept.records:
        assert record.turn == 1 or (record.cached_tokens or 0) > 0


async def test_a_plain_bench_asks_for_nothing_that_only_vllm_knows(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl.gz"
    async with engine_alone() as (engine, target):
        flags = ("--plain", "--first", "128:32", "--later", "128:32", "--qps", "50", "--max-conversations", "3")
        result = await bench(target.url, *flags, "--output", str(path))
        asked = [msgspec.json.decode(received.body) for received in engine.received if b"messages" in received.body]
    assert result.exit_code == 0, result.output
    assert decode(path.read_bytes()).api == "chat, plain"
    sent = set().union(*(body for body in asked if body.get("stream")))
    assert sent == {"messages", "model", "stream", "stream_options", "temperature", "seed", "max_tokens"}


@pytest.mark.parametrize("api", list(Api))
async def test_bench_plays_a_trace_at_its_own_times(bench: Any, tmp_path: Path, api: Api) -> None:
    path = tmp_path / "records.jsonl.gz"
    async with engine_alone() as (_, target):
        trace = ("--trace", str(SAMPLES / "traces" / "mooncake.jsonl"), "--speed", "4", "--endpoint", api.value)
        result = await bench(target.url, *trace, "--output", str(path))
    assert result.exit_code == 0, result.output
    records = decode(path.read_bytes()).records
    arrivals = [record.scheduled_s for record in records if record.turn == 1]
    assert arrivals == pytest.approx([0.0, 0.5, 0.75])
    lengths = [[record.prompt_tokens for record in records if record.conversation == one] for one in range(3)]
    assert lengths == [[1100, 1600, 2100], [700], [1300]]
    gaps = [record.scheduled_s for record in records if record.conversation == 0]
    assert gaps[1] >= 1.5 / 4
    # Its system prompt of one block is what the second conversation finds, of two blocks what the third does.
    assert [record.cached_tokens for record in records if record.turn == 1] == [0, 512, 1024]


async def test_bench_ends_with_1_only_if_every_request_failed(bench: Any) -> None:
    flags = ("--qps", "50", "--max-conversations", "4", "--turns", "1")
    async with engine_alone() as (engine, target):
        engine.faults = Faults(refuse=3)
        some = await bench(target.url, *flags)
        engine.faults = Faults(refuse=4)
        every = await bench(target.url, *flags)
    assert (some.exit_code, every.exit_code) == (0, 1)
    assert "failed: 3 x status 503: Refused on request." in some.stdout
    assert ["failures", "4", "0", "4"] in [line.split() for line in every.stdout.splitlines()]


async def test_bench_leaves_out_what_the_model_has_no_room_for(bench: Any) -> None:
    async with engine_alone(max_model_len=1500) as (_, target):
        trace = ("--trace", str(SAMPLES / "traces" / "mooncake.jsonl"), "--concurrency", "3")
        result = await bench(target.url, *trace)
        none = await bench(target.url, *trace, "--max-context", "10")
    assert "2 of 5 turns are left out: their context is above 1500 tokens" in " ".join(result.stderr.split())
    assert ["requests", "3", "0", "3"] in [line.split() for line in result.stdout.splitlines()]
    assert "no conversation fits into 10 tokens" in none.stderr


async def test_bench_asks_which_of_several_models(bench: Any) -> None:
    async with engine_alone(loras=("tuned",)) as (_, target):
        result = await bench(target.url, "--qps", "5")
        named = await bench(target.url, "--qps", "50", "--model", "tuned", "--max-conversations", "2")
    assert "model: give one of sim, tuned" in result.stderr
    assert named.exit_code == 0
