"""Random lives of engines, of which batches are lost, late or garbled, against an exact model of their caches.

Once all that was sent is read, no session and no prompt may count for more than the engine holds. What an engine sent
last is not lost here: nothing could tell.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable

import msgspec
import pytest
import zmq
import zmq.asyncio

from ppd.proxy.errors import FormatError
from ppd.proxy.fleet.worker import Role
from ppd.proxy.kv_events.block_index import BlockIndex
from ppd.proxy.kv_events.block_tokens import packed, scope_of
from ppd.proxy.kv_events.event_batch import session_name
from ppd.proxy.kv_events.event_stream import EventStream, Replay
from ppd.proxy.kv_events.subscription import Publisher, Subscription, has_more
from ppd.proxy.runtime.tasks import Throttle
from ppd.proxy.telemetry.metrics import Metrics

SEEDS = 150
STEPS = 50
SESSIONS = 3
LONGEST = 12  # blocks of a prompt
TRIES = 6

Chain = tuple[tuple[int, ...], ...]
"""A prompt's blocks up to one, each as its tokens."""


class Engine:
    """One start of an engine: its cache, and the batches that it has numbered from 0."""

    def __init__(self, rng: random.Random, number: int) -> None:
        self.rng = rng
        self.number = number
        self.block_tokens = rng.choice((1, 2))
        self._hash_seed = rng.choice((0, number))
        self._capacity = rng.choice((6, 20, 60))
        self.kept = deque[tuple[int, bytes]](maxlen=rng.choice((2, 5, 1000)))
        self.cache = set[Chain]()
        self.newest = dict[int, Chain]()
        self.sequence = 0
        self.is_all_sent = True

    def held(self, chain: Chain) -> int:
        """Tokens."""
        return self.block_tokens * self._blocks(chain)

    def batch(self, time_s: float) -> bytes:
        """What one step did, published under the number before `sequence`."""
        events = list[dict[str, object]]()
        for _ in range(self.rng.randrange(1, 4)):
            chance = self.rng.random()
            if chance < 0.75:
                events += self._turn(self.rng.randrange(SESSIONS))
            elif chance < 0.95 and self.cache:
                events.append(self._removed(self.rng.choice(sorted(self.cache))))
            elif chance > 0.98:
                self.cache.clear()
                events.append({"type": "AllBlocksCleared"})
        payload = msgspec.msgpack.encode([time_s, events, 0])
        self.kept.append((self.sequence, payload))
        self.sequence += 1
        return payload

    def _blocks(self, chain: Chain) -> int:
        return next((n for n in range(len(chain)) if chain[: n + 1] not in self.cache), len(chain))

    def _turn(self, session: int) -> list[dict[str, object]]:
        """A prompt that goes on from the session's newest one, or parts from it."""
        rng, before = self.rng, self.newest.get(session, ())
        kept = rng.randrange(len(before) + 1) if rng.random() < 0.3 else len(before)
        more = (tuple(rng.randrange(2) for _ in range(self.block_tokens)) for _ in range(rng.randrange(4)))
        chain = (*before[:kept], *more)[:LONGEST]
        first = 0 if rng.random() < 0.3 else self._blocks(chain)  # hits may be announced again
        if first == len(chain):
            return []
        events = list[dict[str, object]]()
        while len(self.cache) + len(chain) > self._capacity:
            others = sorted(one for one in self.cache if one != chain[: len(one)])
            if not others:
                break
            events.append(self._removed(rng.choice(others)))
        self.cache.update(chain[: n + 1] for n in range(len(chain)))
        self.newest[session] = chain
        return [*events, self._stored(chain, first, session)]

    def _removed(self, chain: Chain) -> dict[str, object]:
        self.cache.discard(chain)
        return {"type": "BlockRemoved", "block_hashes": [self._hash(chain)]}

    def _stored(self, chain: Chain, first: int, session: int) -> dict[str, object]:
        return {
            "type": "BlockStored",
            "block_hashes": [self._hash(chain[: n + 1]) for n in range(first, len(chain))],
            "parent_block_hash": self._hash(chain[:first]) if first else None,
            "token_ids": _ids(chain[first:]),
            "block_size": self.block_tokens,
            "extra_keys": [None] * (len(chain) - first),
            "session_id": session_name(session),
        }

    def _hash(self, chain: Chain) -> int:
        return hash((self._hash_seed, chain)) % 2**64


def _ids(chain: Chain) -> list[int]:
    return [token for block in chain for token in block]


class Network:
    """Starts engines one after the other, and carries what they publish: as messages, and in answer to replays."""

    def __init__(self, seed: int, *, replays: bool) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.replays = replays
        self.waiting = deque[list[bytes]]()
        self._time_s = 0.0
        self._engines = 0
        self.restart()

    def restart(self) -> None:
        self.engine = Engine(self.rng, self._engines)
        self._engines += 1
        self.is_new = True  # the reader has not noticed yet

    def pass_time(self) -> None:
        """An engine may publish, or start over."""
        chance = self.rng.random()
        if chance < 0.5:
            self._publish()
        elif chance < 0.58:
            self.restart()

    def _publish(self) -> None:
        self._time_s += self.rng.random()
        engine = self.engine
        sequence, payload = engine.sequence, engine.batch(self._time_s)
        fate = self.rng.random()
        engine.is_all_sent = fate > 0.15
        if engine.is_all_sent:
            payload = payload if fate > 0.2 else payload[: len(payload) // 2]
            self.waiting.append([b"kv@D", sequence.to_bytes(8), payload])

    async def replay(self, endpoint: str, stream: EventStream, dropped: Callable[[str], None]) -> bool:
        """As `kv_events.replay` reads it, while time passes."""
        for _ in range(TRIES if self.replays else 0):
            start, engine, state = stream.replay_from(), self.engine, Replay.OPEN
            if self.rng.random() < 0.1:
                break  # no answer
            kept = [one for one in engine.kept if one[0] >= start]
            ends_after = self.rng.randrange(len(kept) + 1) if self.rng.random() < 0.2 else len(kept)
            for sequence, payload in kept[:ends_after]:
                if self.rng.random() < 0.1:
                    await asyncio.sleep(0)
                    self.pass_time()
                try:
                    state = stream.replayed(sequence, payload)
                except FormatError:
                    dropped("unreadable")
                if state is not Replay.OPEN:
                    break
            else:
                state = stream.replay_ended() if ends_after == len(kept) else Replay.AGAIN
            self.pass_time()
            if state is Replay.CLOSED:
                return True
        return False


class Reader:
    """Reads what the network carries: of each engine by a connection, or of all from one port.

    There an engine's start shows in its incarnation alone.
    """

    def __init__(self, network: Network, context: zmq.asyncio.Context, *, is_bound: bool) -> None:
        self._network = network
        self._is_bound = is_bound
        self._sending, self._socket = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._sending.bind(name := f"inproc://{network.seed}")
        self._socket.connect(name)
        self._subscription = Subscription(network.replay, Throttle(_no_pause), Metrics(), lambda _: self._publisher)
        self._read = self._subscription.read_of_many if is_bound else self._subscription.read
        self._renew()

    async def close(self) -> None:
        await self._subscription.close()
        self._sending.close(linger=0)
        self._socket.close(linger=0)

    async def step(self) -> None:
        network, waiting = self._network, self._network.waiting
        if network.is_new and (not waiting or not self._is_bound):
            if network.rng.random() < 0.6:
                await self._notice_start()
        elif waiting:
            for _ in range(network.rng.randrange(len(waiting)) + 1):
                await self._sending.send_multipart(waiting.popleft())
                while has_more(self._socket):
                    await self._read(self._socket)
            while self._is_bound and network.rng.random() < 0.5:
                await asyncio.sleep(0)

    async def _notice_start(self) -> None:
        self._network.is_new = False
        if self._is_bound:
            self._renew()
        else:
            self._network.waiting.clear()
            await self._subscription.catch_up(self._publisher)

    def check(self) -> None:
        network, stream, engine = self._network, self._publisher.stream, self._network.engine
        is_catching_up = self._subscription.is_catching_up(stream)
        if network.waiting or network.is_new or is_catching_up or not engine.is_all_sent:
            return
        stream.is_behind = False
        for session in range(SESSIONS):
            chain = engine.newest.get(session, ())
            assert (stream.held(session) or 0) <= engine.held(chain)
            found = stream.held_of(packed(_ids(chain)), scope_of("", ""))
            assert (found or 0) <= engine.held(chain)
            assert found is None or found == engine.held(chain) or not stream.index.is_whole

    def _renew(self) -> None:
        stream = EventStream(BlockIndex(sweep_slack=8), reads_tokens=True)
        self._publisher = Publisher(stream, Role.DECODE, "replays" if self._network.replays else "")


async def _no_pause(seconds: float) -> None:
    pass


@pytest.mark.parametrize("replays", [True, False])
@pytest.mark.parametrize("is_bound", [True, False])
async def test_no_more_counts_than_an_engine_holds_whatever_becomes_of_it(is_bound: bool, replays: bool) -> None:
    with zmq.asyncio.Context() as context:
        for seed in range(SEEDS):
            network = Network(seed, replays=replays)
            reader = Reader(network, context, is_bound=is_bound)
            try:
                for _ in range(STEPS):
                    for _ in range(network.rng.randrange(3)):
                        network.pass_time()
                    await reader.step()
                    reader.check()
            finally:
                await reader.close()
