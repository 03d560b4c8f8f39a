"""Sessions over several processes are those of one proxy, whatever clients do and wherever their turns land."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from ppd.proxy.beliefs.held import Residency
from ppd.proxy.config import Mode
from ppd.proxy.peers import channels
from ppd.proxy.sessions.prefix_chain import PrefixEnd
from ppd.proxy.sessions.session import KnownPrefix, Session, index_keys
from tests.support.fleet import crowded
from tests.support.processes import ProxyGroup, proxy_group
from tests.support.proxy import ProxyClient

LONG = "A message of some length, so that there are blocks to hold. " * 6
STEPS = 200


@dataclass
class Script:
    """Steps drawn from a seed and from what was answered before, which is the same wherever they are taken."""

    seed: int
    named: bool = True  # some turns name their session, and several histories may be under one name
    draw: random.Random = field(init=False)
    histories: list[list[dict[str, Any]]] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    async def step(self, at: ProxyClient) -> Any:
        """One turn: a new conversation, the next turn of one, the same again, an edit, a branch."""
        what = self.draw.choice(("new", "next", "next", "next", "retry", "edit", "respond", "named"))
        reply_tokens = self.draw.choice((4, 24))  # so one prompt has two replies
        said = f"{self.draw.randrange(3)} {self.draw.choice(('', LONG))}"
        if what == "respond":
            return await self._respond(at, said, reply_tokens)
        headers = {"X-Session-Id": f"name-{self.draw.randrange(3)}"} if what == "named" and self.named else None
        known = self.draw.choice(self.histories) if self.histories and what != "new" else []
        if what == "retry" and known:
            messages = known[:-1]
        elif what == "edit" and known:
            messages = [*known[: 2 * self.draw.randrange(len(known) // 2)], {"role": "user", "content": said}]
        else:
            messages = [*known, {"role": "user", "content": said}]
        turn = await at.chat(messages, headers, max_tokens=reply_tokens)
        if turn.status == 200 and len(messages) < 20:
            self.histories.append([*messages, {"role": "assistant", "content": turn.text}])
        return turn

    async def _respond(self, at: ProxyClient, said: str, tokens: int) -> Any:
        body: dict[str, Any] = {"model": "sim", "input": said, "max_output_tokens": max(16, tokens), "store": True}
        if self.responses and self.draw.random() < 0.8:
            body["previous_response_id"] = self.draw.choice(self.responses[-4:])
        turn = await at.post("/v1/responses", body)
        if turn.status == 200:
            self.responses.append(turn.body["id"])
        return turn


async def told(group: ProxyGroup, seed: int, steps: int = STEPS) -> list[Any]:
    """What the receipts say of each step; sessions by the order in which they came up."""
    script, where = Script(seed), random.Random(seed)
    sessions, found = dict[str, int](), list[Any]()
    for _ in range(steps):
        at = group.proxies[where.randrange(len(group.proxies))]
        turn = await script.step(at)
        receipt = await at.receipt(turn)
        number = sessions.setdefault(receipt["session"], len(sessions))
        about = ("kind", "turn", "route", "reason", "decode", "prefill", "estimated_cached_tokens", "cached_tokens")
        found.append((turn.status, number, *(receipt[name] for name in about)))
    return found


@pytest.mark.parametrize("seed", range(4))
async def test_a_script_of_turns_gives_the_same_receipts_on_three_as_on_one(seed: int) -> None:
    names = "P1 D1" if seed % 2 else "R1"
    mode = (Mode.REPLICA, Mode.ALWAYS_LOCAL, Mode.REPLICA, Mode.ALWAYS_SPLIT)[seed]
    async with proxy_group(names, 1, mode=mode) as group:
        on_one = await told(group, seed)
    async with proxy_group(names, 3, mode=mode) as group:
        on_three = await told(group, seed)
    kinds = Counter(step[2] for step in on_one)
    assert set(kinds) >= {"first", "next", "retry", "branch"}, kinds
    first = next((n for n, (one, three) in enumerate(zip(on_one, on_three, strict=True)) if one != three), None)
    assert first is None, (first, on_one[first], on_three[first])


async def test_all_find_a_prefix_in_the_same_session() -> None:
    """Two replies to one prompt are two sessions; the prompt leads to the newest, whoever has served it."""
    async with proxy_group("R1", 3, mode=Mode.REPLICA) as group:
        script = Script(7)
        for step in range(STEPS):
            await script.step(group.proxies[step % 3])
            for one in group.proxies.values():
                one.proxy.membership.catch_up()
            tables = [one.proxy.state.sessions for one in group.proxies.values()]
            assert len({len(table) for table in tables}) == 1
            named, index = (
                [{k: s.history for k, s in of.items()} for of in ofs]
                for ofs in ([table._renamed for table in tables], [table._index for table in tables])
            )
            assert named[0] == named[1] == named[2], step
            assert index[0] == index[1] == index[2], step


@pytest.mark.parametrize("streams", [False, True])
async def test_whoever_has_an_answer_is_known_to_all(monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    async with proxy_group("R1", 3, mode=Mode.REPLICA) as group:
        monkeypatch.setattr(channels, "ROUND_S", 3600.0)  # nobody is told of what can wait
        said: list[dict[str, Any]] = []
        for step in range(6):
            said.append({"role": "user", "content": f"{step}"})
            at, body = group.proxies[step % 3], {"model": "sim", "messages": said, "max_tokens": 4, "stream": streams}
            async with at.session.post(f"{at.base_url}/v1/chat/completions", json=body) as response:
                text = whole_text(await response.read(), streams)
            receipt = at.proxy.state.receipts.find(response.headers["X-Request-Id"])
            assert receipt is not None and receipt.turn == step + 1
            said.append({"role": "assistant", "content": text})


def whole_text(answer: bytes, streams: bool) -> str:
    parts = [part for part in answer.split(b"data: ") if part.startswith(b"{")] if streams else [answer]
    choices = [choice for part in parts for choice in json.loads(part)["choices"]]
    return "".join((choice["delta"] if streams else choice["message"]).get("content") or "" for choice in choices)


async def test_a_session_stays_with_its_worker_wherever_its_turns_land() -> None:
    async with proxy_group("P1 D1 D2 D3", 3) as group:
        script, where = Script(11, named=False), random.Random(11)
        homes = dict[str, set[str]]()
        for _ in range(120):
            at = group.proxies[where.randrange(3)]
            receipt = await at.receipt(await script.step(at))
            if receipt["kind"] in ("next", "retry"):
                homes.setdefault(receipt["session"], set()).add(receipt["decode"])
        assert len(homes) > 5
        assert {len(home) for home in homes.values()} == {1}


# -- at once


async def test_turns_of_one_session_on_all_at_once_leave_one_that_can_be_found() -> None:
    async with proxy_group("P1 D1 D2", 3) as group:
        draw = random.Random(3)
        for conversation in range(4):
            messages: list[dict[str, Any]] = []
            for number in range(4):
                messages = [*messages, {"role": "user", "content": f"{conversation} {number} {LONG}"}]
                turns = await asyncio.gather(
                    *(
                        one.chat(messages, max_tokens=draw.choice((4, 8, 24)))
                        for one in group.proxies.values()
                        for _ in range(2)
                    )
                )
                assert {turn.status for turn in turns} == {200}
                chosen = draw.choice(turns)
                messages = [*messages, {"role": "assistant", "content": chosen.text}]
                at = draw.choice(list(group.proxies.values()))
                receipt = await at.receipt(await at.chat([*messages, {"role": "user", "content": "so?"}]))
                assert receipt["kind"] in ("next", "branch")
                assert receipt["turn"] == number + 2
                assert receipt["estimated_cached_tokens"] > 0
        await group.until(group.idle)


async def test_one_name_used_on_all_at_once_raises_nothing() -> None:
    async with proxy_group("P1 D1", 3) as group:
        name = {"X-Session-Id": "shared"}
        for number in range(3):
            turns = await asyncio.gather(
                *(
                    one.chat([{"role": "user", "content": f"{n} {number} {LONG}"}], name)
                    for n, one in enumerate(list(group.proxies.values()) * 3)
                )
            )
            assert {turn.status for turn in turns} == {200}
        for one in group.proxies.values():
            one.proxy.membership.catch_up()
        assert len({len(one.proxy.state.sessions) for one in group.proxies.values()}) == 1


# -- keeping


async def test_adopted_sessions_expire_and_leave_nothing_in_any_index() -> None:
    async with proxy_group("R1", 3, mode=Mode.REPLICA, session_ttl_s=1000.0) as group:
        script = Script(5)
        for number in range(60):
            await script.step(group.proxies[number % 3])
        for one in group.proxies.values():
            one.proxy.membership.catch_up()
            table = one.proxy.state.sessions
            assert len(table) > 5
            table._expire(one.proxy.state.now() + 1001.0)
            assert (len(table), table._index, table._renamed) == (0, {}, {})


async def test_one_that_serves_nobody_keeps_no_more_sessions_than_others() -> None:
    async with proxy_group("R1", 2, mode=Mode.REPLICA, session_limit=8) as group:
        for number in range(20):
            await group.proxies[0].chat([{"role": "user", "content": f"{number} {LONG}"}])
        group.proxies[1].proxy.membership.catch_up()
        held = [[s.history for s in one.proxy.state.sessions.all()] for one in group.proxies.values()]
        assert [len(of_one) for of_one in held] == [8, 8]
        assert held[0] == held[1]


def session(number: int, at_s: float, address: str) -> Session:
    key = (number * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    found = Session(key, None)
    found.turn, found.seen_s = 1, at_s
    prefixes = [
        KnownPrefix.at(PrefixEnd(key, number, 1), 1, 100, is_prompt=True),
        KnownPrefix.at(PrefixEnd(key ^ 1, number, 2), 1, 120),
    ]
    found.learn(20.0, Residency(address, "i", 120), None)  # type: ignore[arg-type]
    found.keep_prefixes(prefixes)
    return found


async def test_a_newcomer_learns_20000_sessions_while_turns_go_on() -> None:
    async with proxy_group("R1", 3, mode=Mode.REPLICA) as group:
        await group.stop(2)
        now_s, address = group.proxies[0].proxy.state.now(), group.engines["R1"].address
        for number in range(20_000):
            one = session(number + 1, now_s - 100.0 + number * 0.001, address)
            for proxy in group.proxies.values():
                proxy.proxy.state.sessions.adopt(one, one.label, index_keys(one))
        chats = [group.chat() for _ in range(4)]
        slowest = 0.0
        ended = asyncio.Event()

        async def talk(chat: Any, number: int) -> None:
            nonlocal slowest
            turns = 0
            while not ended.is_set() or turns < 2:
                begun_s = asyncio.get_running_loop().time()
                turn = await chat.at(group.proxies[(turns + number) % 2], f"{number} {turns}", max_tokens=2)
                slowest = max(slowest, asyncio.get_running_loop().time() - begun_s)
                turns += 1
                receipt = await group.proxies[0].receipt(turn)
                assert (receipt["turn"], turn.status) == (turns, 200)

        talking = [asyncio.create_task(talk(chat, number)) for number, chat in enumerate(chats)]
        await asyncio.sleep(0)
        newcomer = await group.start(2)
        ended.set()
        await asyncio.gather(*talking)
        print("slowest turn", slowest)
        await group.until(lambda: newcomer.proxy.membership._has_state)  # of old sessions it is told while it serves
        for member in group.proxies.values():  # what the last turns taught may still be on its way to any of them
            member.proxy.membership.catch_up()
        tables = [one.proxy.state.sessions for one in group.proxies.values()]
        assert len({len(table) for table in tables}) == 1
        assert len({frozenset((key, s.history) for key, s in table._index.items()) for table in tables}) == 1
        newest = [[s.history for s in table.all()][-4:] for table in tables]
        assert sorted(newest[0]) == sorted(newest[-1]), "what was used last is what goes last"
        receipt = await newcomer.receipt(await chats[0].at(newcomer, "more"))
        assert receipt["kind"] == "next"


HISTORY = "A long history that is dear to compute again. " * 300


async def test_a_session_that_moves_by_one_process_is_at_home_there_for_the_others() -> None:
    settings: dict[str, Any] = {"mode": Mode.SLO, "profile": "h100-llama-3.1-8b", "moves_kv": True}
    async with proxy_group("D1 D2", 2, **settings) as group:
        first, other = group.proxies.values()
        chat, views = group.chat(), first.proxy.state.registry.views()
        home = (await chat.at(first, HISTORY)).headers["X-PPD-Decode"]
        at = next(view.id for view in views if view.name == home)
        await group.until(group.idle)
        with crowded(first.proxy, at):
            await group.until(lambda: any(view.context_tokens > 10**6 for view in other.proxy.state.registry.views()))
            moved = await chat.at(other, "And then?")
        assert (moved.route, moved.headers["X-PPD-Prefill"]) == ("SPLIT", home)
        await group.until(group.idle)
        again = await chat.at(first, "And then?")
        assert (again.route, again.headers["X-PPD-Decode"]) == ("LOCAL", moved.headers["X-PPD-Decode"])
        await group.until(group.idle)
