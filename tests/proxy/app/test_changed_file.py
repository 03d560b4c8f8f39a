"""A config file that gives its workers other roles and models, and what each process of a picker makes of that."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ppd.proxy.app.lifespan import _reloaded, start
from ppd.proxy.app.peer_commands import Add, Command, Remove, run_command
from ppd.proxy.assembly import Proxy
from ppd.proxy.fleet.worker import Announcement, Role, Source, Worker, WorkerId
from ppd.proxy.gateway.headers import DESTINATION, PREFILLER
from ppd.proxy.runtime.watched_files import STILL_IF_SHORTER
from tests.proxy.gateway.envoy import Envoy, chat, mutation
from tests.support.processes import Pair

A, B, C = (WorkerId(f"10.0.0.{number}:8000") for number in (1, 2, 3))


def text(*workers: str, w_ttft: float = 1.0) -> str:
    return (
        f'w_ttft = {w_ttft}\nmode = "always_split"\nheartbeat_port = 0\nwarm_up_s = 0.0\nworkers = {list(workers)!r}\n'
    )


class ChangedFile:
    """Two processes with one file, whose workers answer each probe."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_text(text(f"P={A}", f"D={B}"))
        self.pair = Pair(file)

    async def join(self) -> None:
        await self.pair.join()
        _reloaded(self.pair.ones[0], True)
        self._probe()

    def say(self, *workers: str, w_ttft: float = 1.0) -> None:
        """The leader looks at it, and tells the other."""
        self._file.write_text(text(*workers, w_ttft=w_ttft))
        leader, _ = self.pair.ones
        assert True in (leader.settings.look() for _ in range(1 + STILL_IF_SHORTER))
        _reloaded(leader, True)
        self._probe()
        assert [one.settings.config.w_ttft for one in self.pair.ones] == [w_ttft] * 2
        assert [one.chooser.rules.weights.ttft for one in self.pair.ones] == [w_ttft] * 2

    def _probe(self) -> None:
        registry = self.pair.ones[0].state.registry
        for view in registry.views():
            registry.probed(view.id, view.worker, None, self.pair.clock)
        leader, other = (one.membership for one in self.pair.ones)
        leader._channels.flush()
        other.catch_up()
        self.pair.clock += 1.0

    async def end(self) -> None:
        await self.pair.hush()
        self.pair.close()


async def picked(proxy: Proxy, asked: str, model: str = "m") -> tuple[str, str | None]:
    """The worker that answers a new session's turn, and its P; empty: it is refused."""
    envoy = Envoy(proxy)
    await envoy.turn(chat(model=model, messages=[{"role": "user", "content": asked}]))
    answer = envoy.answers[-1]
    envoy.call.lost()
    if answer.HasField("immediate_response"):
        return "", None
    sent, _ = mutation(answer)
    return sent[DESTINATION], sent.get(PREFILLER)


@pytest.mark.parametrize(
    ("model", "said", "found"),
    [
        ("m", (f"P={A}", f"D={B}"), (B, A)),
        ("m", (f"P={B}", f"D={A}"), (A, B)),
        ("m", (f"P={A},connector=mooncake", f"D={B}"), (B, None)),
        ("m", (f"R={A}",), (A, None)),
        ("m", (f"D={B}",), (B, None)),
        ("m", (f"P={A},model=n", f"D={B},model=n"), ("", None)),
        ("n", (f"P={A},model=n", f"D={B},model=n"), (B, A)),
        ("n", (f"P={A}", f"R={B},model=n"), (B, None)),
    ],
)
async def test_turns_go_by_the_roles_and_models_that_the_file_says_now(
    tmp_path: Path, model: str, said: tuple[str, ...], found: tuple[str, str | None]
) -> None:
    it = ChangedFile(tmp_path / "ppd.toml")
    try:
        await it.join()
        for number, one in enumerate(it.pair.ones):
            assert await picked(one, f"{number} before") == (B, A)
        it.say(*said)
        for number, one in enumerate(it.pair.ones):
            assert await picked(one, f"{number} after", model) == found
        it.say(f"P={A}", f"D={B}")
        for number, one in enumerate(it.pair.ones):
            assert await picked(one, f"{number} again") == (B, A)
    finally:
        await it.end()


def known(it: ChangedFile) -> list[dict[str, str]]:
    """The roles by address, as each process knows them."""
    return [{view.id: str(view.role) for view in one.state.registry.views()} for one in it.pair.ones]


@pytest.mark.parametrize(
    ("command", "left"),
    [(Remove(B), {A: "P"}), (Add(f"R={B}"), {A: "P", B: "R"}), (Add(f"D={C}"), {A: "P", B: "D", C: "D"})],
)
async def test_what_an_operator_did_to_a_worker_holds_until_the_file_says_something_else_of_it(
    tmp_path: Path, command: Command, left: dict[WorkerId, str]
) -> None:
    it = ChangedFile(tmp_path / "ppd.toml")
    try:
        await it.join()
        run_command(it.pair.ones[0], msgspec.msgpack.encode(command))
        for w_ttft in (2.0, 3.0):
            it.say(f"P={A}", f"D={B}", w_ttft=w_ttft)
            assert known(it) == [left] * 2
        it.say(f"P={A}", f"D={B},x=0.5", w_ttft=3.0)
        assert known(it) == [left | {B: "D"}] * 2
    finally:
        await it.end()


@pytest.mark.parametrize(("command", "said"), [(Add(f"R={B}"), f"D={B},x=0.5"), (Add(f"D={C}"), f"D={C}")])
async def test_a_worker_that_the_file_has_named_since_goes_with_its_line(
    tmp_path: Path, command: Command, said: str
) -> None:
    it = ChangedFile(tmp_path / "ppd.toml")
    try:
        await it.join()
        run_command(it.pair.ones[0], msgspec.msgpack.encode(command))
        it.say(f"P={A}", said)
        it.say(f"P={A}")
        assert known(it) == [{A: "P"}] * 2
        assert [one.settings.added for one in it.pair.ones] == [set(), set()]
    finally:
        await it.end()


async def test_a_worker_that_the_file_leaves_to_its_agent_is_never_gone(tmp_path: Path) -> None:
    it = ChangedFile(tmp_path / "ppd.toml")
    try:
        await it.join()
        announced = Worker(role=Role.DECODE, address=B, models=("m",), source=Source.AGENT, incarnation="a")
        it.pair.ones[0].state.registry.apply(Announcement(announced), it.pair.clock)
        it.say(f"P={A}")
        assert known(it) == [{A: "P", B: "D"}] * 2
        assert [await picked(one, f"{number} after") for number, one in enumerate(it.pair.ones)] == [(B, A)] * 2
    finally:
        await it.end()


@pytest.mark.parametrize("index", [0, 1])
async def test_only_the_leader_reads_the_file(tmp_path: Path, index: int) -> None:
    """Two that read it by themselves would differ for good, if an operator changed the same key between the two."""
    it = ChangedFile(tmp_path / "ppd.toml")
    try:
        await it.join()
        background = start(it.pair.ones[index])
        assert ("settings" in {task.get_name() for task in background._tasks}) is (index == 0)
        await background.close()
    finally:
        await it.end()


@pytest.mark.parametrize(("command", "role"), [(Remove(B), None), (Add(f"R={B}"), "R")])
async def test_what_an_operator_did_since_a_change_of_the_file_outlives_the_leader(
    tmp_path: Path, command: Command, role: str | None
) -> None:
    """Its successor begins with the config as it was at the proxy's start."""
    it = ChangedFile(tmp_path / "ppd.toml")
    try:
        await it.join()
        it.say(f"P={A}", f"D={B},x=0.5")
        run_command(it.pair.ones[0], msgspec.msgpack.encode(command))
        it.pair.ones[0].membership._channels.close()
        it.pair.ones[0] = successor = it.pair.begin(0)
        await successor.membership.join()
        _reloaded(successor, True)
        view = successor.state.registry.view(B)
        assert (view and str(view.role)) == role
        assert [one.settings.added for one in it.pair.ones] == [{B} if role else set()] * 2
    finally:
        await it.end()
