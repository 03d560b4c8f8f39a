"""Whichever of a proxy's processes an operator asks, he sees and changes the whole."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ppd.proxy.config import Mode
from tests.support.processes import LONG, NUMBERS, ProxyGroup, opener, proxy_group
from tests.support.proxy import ProxyClient

REPLICA: dict[str, Any] = {"mode": Mode.REPLICA}


async def everywhere(group: ProxyGroup, method: str, path: str) -> list[Any]:
    return [await one.admin(method, path) for one in group.proxies.values()]


# -- weights


async def test_weights_set_at_one_are_in_force_at_all_and_for_those_that_come() -> None:
    async with proxy_group("P1 D1", 3, mode=Mode.ALWAYS_LOCAL) as group:
        chat = group.chat()
        await chat.at(group.proxies[0], f"{next(NUMBERS)} {LONG}")
        wanted = {"mode": "always_split", "order": "decode_first", "w_ttft": 3.5, "x": 0.25}
        status, now = await group.proxies[1].admin("PUT", "/weights", wanted)
        assert status == 200
        assert await everywhere(group, "GET", "/weights") == [(200, now)] * 3
        for one in group.proxies.values():
            assert (await chat.at(one, f"more {LONG}")).route == "SPLIT"
        for which, end in ((1, group.stop), (0, group.kill)):
            await end(which)
            newcomer = await group.start(which)
            assert (await chat.at(newcomer, f"more {LONG}")).route == "SPLIT"
            assert await everywhere(group, "GET", "/weights") == [(200, now)] * 3


async def test_weights_that_are_set_at_several_at_once_are_the_same_at_all() -> None:
    async with proxy_group("R1", 3, **REPLICA) as group:
        for of_this_try in range(5):
            told = [{"w_ttft": of_this_try + number / 10} for number in range(1, 4)]
            asked = zip(group.proxies.values(), told, strict=True)
            answers = await asyncio.gather(*(one.admin("PUT", "/weights", body) for one, body in asked))
            assert [status for status, _ in answers] == [200] * 3
            now = [weights["w_ttft"] for _, weights in await everywhere(group, "GET", "/weights")]
            assert len(set(now)) == 1
            assert {"w_ttft": now[0]} in told


@pytest.mark.parametrize(
    "body",
    [
        {"port": 1},
        {"w_ttft": -1},
        {"w_ttft": 10**30},
        {"x": "a" * 1000},
        {"mode": "no such"},
        {"mode": "table", "table": "no such"},
        {"table": "no such"},
    ],
)
async def test_weights_that_are_refused_change_nothing_anywhere(body: dict[str, Any]) -> None:
    async with proxy_group("R1", 2, **REPLICA) as group:
        before = await everywhere(group, "GET", "/weights")
        answers = [await one.admin("PUT", "/weights", body) for one in group.proxies.values()]
        assert answers[0] == answers[1]
        assert answers[0][0] == 400
        assert await everywhere(group, "GET", "/weights") == before


# -- workers


async def workers(group: ProxyGroup) -> list[list[dict[str, Any]]]:
    """What each says of the workers, without how long ago that was."""
    found = [body["workers"] for _, body in await everywhere(group, "GET", "/workers")]
    for worker in itertools.chain(*found):
        del worker["report_age_s"]
    return [sorted(of_one, key=lambda worker: worker["name"]) for of_one in found]


@pytest.mark.parametrize("at", [0, 1, 2])
async def test_workers_are_added_drained_and_removed_at_any(at: int) -> None:
    async with proxy_group("P1 D1", 3) as group:
        extra = group.engines["D1"].address.replace("127.0.0.1", "localhost")
        asked = group.proxies[at]
        assert await asked.admin("POST", "/workers", {"worker": f"D={extra}"}) == (201, {"id": extra})
        await group.until(lambda: all(one.states().get("D2") == "up" for one in group.proxies.values()))
        for draining in (True, False):
            status, worker = await asked.admin("PATCH", "/workers/D2", {"draining": draining})
            assert (status, worker["state"]) == (200, "draining" if draining else "up")
            seen = await workers(group)
            assert [one["state"] for one in seen[0]] == ["up", worker["state"], "up"]
            assert seen[0] == seen[1] == seen[2]
        assert await asked.admin("DELETE", "/workers/D2") == (200, {"id": extra})
        assert [[worker["name"] for worker in one] for one in await workers(group)] == [["D1", "P1"]] * 3


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/workers", {"worker": "no worker"}, 400),
        ("POST", "/workers", {"worker": ""}, 400),
        ("POST", "/workers", {}, 400),
        ("PATCH", "/workers/D9", {"draining": True}, 404),
        ("DELETE", "/workers/D9", None, 404),
    ],
)
async def test_what_cannot_be_done_is_said_alike_by_all(method: str, path: str, body: Any, status: int) -> None:
    async with proxy_group("P1 D1", 2) as group:
        leaders, followers = [await one.admin(method, path, body) for one in group.proxies.values()]
        assert leaders == followers
        assert leaders[0] == status
        assert leaders[1]["error"]["message"]


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_the_successor_of_the_one_that_leads_keeps_what_operators_did(end: str) -> None:
    async with proxy_group("P1 D1 R1", 2) as group:
        extra = group.engines["D1"].address.replace("127.0.0.1", "localhost")
        await group.proxies[1].admin("POST", "/workers", {"worker": f"D={extra}"})
        await group.until(lambda: all(one.states().get("D2") == "up" for one in group.proxies.values()))
        await group.proxies[1].admin("DELETE", "/workers/R1")
        await group.proxies[1].admin("PATCH", "/workers/D1", {"draining": True})
        await (group.stop(0) if end == "stop" else group.kill(0))
        both = await group.start(0), group.proxies[1]
        wanted = {"P1": "up", "D1": "draining", "D2": "up"}
        await group.until(lambda: [one.states() for one in both] == [wanted] * 2)
        await asyncio.sleep(0.5)  # it has probed them
        assert [one.states() for one in both] == [wanted] * 2


async def test_commands_while_none_leads_are_refused_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppd.proxy.peers.membership.ANSWER_S", 0.2)
    async with proxy_group("R1", 2, **REPLICA) as group:
        await group.kill(0)
        follower = group.proxies[1]
        status, body = await follower.admin("DELETE", "/workers/R1")
        assert (status, body["error"]["type"]) == (503, "service_unavailable_error")
        assert (await opener(follower)).status == 200
        assert (await follower.admin("GET", "/requests"))[0] == 200
        newcomer = await group.start(0)
        assert (await opener(newcomer)).status == 200
        # What was refused is not done later.
        await asyncio.sleep(0.3)
        assert list(follower.states()) == ["R1"]


# -- sessions and receipts


async def test_a_session_that_is_dropped_at_one_is_unknown_to_all() -> None:
    async with proxy_group("P1 D1", 3) as group:
        chat = group.chat()
        session = (await group.proxies[0].receipt(await chat.at(group.proxies[0], LONG)))["session"]
        assert [status for status, _ in await everywhere(group, "GET", f"/sessions/{session}")] == [200] * 3
        assert (await group.proxies[1].admin("DELETE", f"/sessions/{session}"))[0] == 200
        assert [status for status, _ in await everywhere(group, "GET", f"/sessions/{session}")] == [404] * 3
        assert [len(one.proxy.state.sessions._index) for one in group.proxies.values()] == [0] * 3
        receipt = await group.proxies[0].receipt(await chat.at(group.proxies[2], f"more {LONG}"))
        assert (receipt["kind"], receipt["turn"]) == ("first", 1)


async def test_receipts_of_any_are_found_at_all_and_merged_by_their_time() -> None:
    async with proxy_group("R1", 3, **REPLICA) as group:
        turns = [await opener(group.proxies[number % 3]) for number in range(9)]
        ids = [turn.headers["X-Request-Id"] for turn in turns]
        for one in group.proxies.values():
            assert [(await one.receipt(turn))["id"] for turn in turns] == ids
            _, found = await one.admin("GET", "/requests?limit=5")
            assert [receipt["id"] for receipt in found["newest"]] == ids[:-6:-1]
            assert (await one.admin("GET", "/requests/none"))[0] == 404


# -- metrics


async def scraped(at: ProxyClient, url: str | None = None) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    async with at.session.get(f"{url or at.base_url}/metrics") as response:
        families = list(text_string_to_metric_families(await response.text()))
    assert len({group.name for group in families}) == len(families)
    samples = [sample for group in families for sample in group.samples]
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(found) == len(samples)
    return {key: value for key, value in found.items() if not key[0].startswith("ppd_loop_lag")}  # grows by itself


COUNTS = ("_total", "_count", "_sum", "_bucket")


async def test_all_give_the_same_sums() -> None:
    async with proxy_group("P1 D1 D2", 3) as group:
        chats = [group.chat() for _ in range(6)]
        for number, chat in enumerate(chats * 3):
            assert (await chat.at(group.proxies[number % 3], f"{number} {LONG}")).status == 200
        await opener(group.proxies[2], model="unknown")
        await group.until(group.idle)
        scrapes = [await scraped(one) for one in group.proxies.values()]
        connections = ("ppd_connections", ())
        for found in scrapes:
            found.pop(connections)
        assert scrapes[0] == scrapes[1] == scrapes[2]
        found = scrapes[0]
        assert sum(v for (name, _), v in found.items() if name == "ppd_turn_outcomes_total") == 18 + 1
        assert sum(v for (name, _), v in found.items() if name == "ppd_leg_seconds_count") == 18 + 6
        for labels in ({"leg": "local"}, {"leg": "decode"}, {"leg": "prefill"}):
            of_leg = tuple(labels.items())
            last = found["ppd_leg_seconds_bucket", tuple(sorted([*of_leg, ("le", "+Inf")]))]
            assert last == found["ppd_leg_seconds_count", of_leg]
        assert found["ppd_workers", (("role", "D"), ("state", "up"))] == 2
        assert found["ppd_sessions", ()] == 6
        assert not [name for name, _ in found if name.endswith("_created")]


async def test_engines_that_each_process_hears_for_itself_are_shown_once() -> None:
    events = {"kv_events_endpoint": "tcp://127.0.0.1:*", "kv_events_replay_endpoint": "tcp://127.0.0.1:*"}
    async with proxy_group("D1", 2, engine=events, mode=Mode.ALWAYS_LOCAL) as group:
        (d1,) = (view.id for view in group.proxies[0].proxy.state.registry.views())

        def heard() -> list[int]:
            """Blocks, as each process that is not behind knows of them."""
            caches = (one.proxy.state.engine_caches for one in group.proxies.values())
            return [len(stream.index) for one in caches for stream in one.streams(d1) if not stream.is_behind]

        await opener(group.proxies[0])
        await group.until(lambda: len(heard()) == 2 and len({0, *heard()}) == 2)
        for one in group.proxies.values():
            assert await one.metric('ppd_workers_on_kv_events{role="D"}') == 1
            assert await one.metric('ppd_kv_event_blocks{role="D"}') == heard()[0]


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_counts_never_fall_when_a_process_ends_and_another_takes_its_place(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppd.proxy.peers.membership.ANSWER_S", 0.2)  # of the one that has ended, while it is down
    async with proxy_group("R1", 3, **REPLICA) as group:
        before = await scraped(group.proxies[0])

        async def grown(at: ProxyClient) -> None:
            nonlocal before
            now = await scraped(at)
            fallen = {key: (old, now.get(key)) for key, old in before.items() if now.get(key, 0.0) < old}
            assert not {key: fall for key, fall in fallen.items() if key[0].endswith(COUNTS)}
            before = now

        for which in (1, 0, 2):
            for one in group.proxies.values():
                await opener(one)
                await grown(one)
            await (group.stop(which) if end == "stop" else group.kill(which))
            for one in group.proxies.values():
                await grown(one)
            newcomer = await group.start(which)
            for one in (newcomer, *group.proxies.values()):
                await grown(one)
        assert sum(v for (name, _), v in before.items() if name == "ppd_turn_outcomes_total") == 9


# -- the fleet


def books(group: ProxyGroup) -> list[dict[str, list[int]]]:
    """By proxy and worker: tokens of the entries in its book of that worker, used longest ago first."""
    return [
        {
            view.name: [book.held(key) for key, _ in book.oldest(1 << 20)]
            for view in one.proxy.state.registry.views()
            if (book := one.proxy.state.beliefs._books.get(view.id)) is not None
        }
        for one in group.proxies.values()
    ]


@pytest.mark.parametrize("end", ["stop", "kill"])
@pytest.mark.parametrize("which", [0, 1])
async def test_every_process_and_a_successor_keep_the_same_books(which: int, end: str) -> None:
    async with proxy_group("P1 D1 D2", 3) as group:
        chats = [group.chat() for _ in range(4)]
        for number, one in enumerate(group.proxies.values()):
            for at, chat in enumerate(chats):
                await chat.at(one, f"{number} {at} " + "and so on " * 40 * (at + 1), max_tokens=2 + at)
        await group.until(lambda: all(of_one == books(group)[0] for of_one in books(group)))
        told = books(group)[0]
        assert [len(entries) for name, entries in told.items() if name != "P1"].count(0) == 0
        await (group.stop(which) if end == "stop" else group.kill(which))
        await group.start(which)
        await group.until(lambda: books(group) == [told] * 3)


async def test_a_worker_that_restarts_holds_nothing_for_any() -> None:
    async with proxy_group("P1 D1", 2, probe_interval_s=0.05) as group:
        chat = group.chat()
        await chat.at(group.proxies[1], LONG)
        assert (await chat.at(group.proxies[1], f"more {LONG}")).route == "LOCAL"
        ids = [view.incarnation for view in group.proxies[1].proxy.state.registry.views() if view.name == "D1"]
        follower = group.proxies[1].proxy.state.registry
        leader = group.proxies[0].proxy.state.registry
        (d1,) = [view for view in leader.views() if view.name == "D1"]
        leader._admit(d1.worker, "another", 0.0)
        await group.until(lambda: [v.incarnation for v in follower.views() if v.name == "D1"] == ["another"])
        assert ids != ["another"]
