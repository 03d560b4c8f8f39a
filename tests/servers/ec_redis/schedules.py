"""Does the encoder cache's book-keeping leak? Plays random schedules of producers, consumers and the network between.

    python -m tests.servers.ec_redis.schedules --schedules 100000

In each step one thing happens: a request comes, is asked about, or ends; something is encoded; time passes; an engine
dies and begins anew; data have been sent, or could not be; a message is delivered, lost, or delivered and kept to come
again. After each step no room is
overfull, and no request waits longer than it may. In the end all requests finish, time passes, and every book is empty.
A failure names the seed of its schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import click

from ppd.servers.ec_redis.holdings import Delivery, Holdings, Withdrawal
from ppd.servers.ec_redis.reservations import Embedding, Input, Offer, Reservations, Room, Verdict

TTL_S, WAIT_S = 10.0, 3.0
CAPACITY_BYTES, LARGEST_BYTES = 100, 90
ITEMS = {name: Embedding((rows, 5), "F16") for name, rows in (("a", 1), ("b", 3), ("c", 5), ("d", 9), ("e", 10))}
STEPS = 60


class Leak(AssertionError):
    """A promise was broken."""


@dataclass
class Encoder:
    """A producer, as often as it begins."""

    name: str
    room: Room = field(default_factory=lambda: Room(CAPACITY_BYTES))
    sending: list[Delivery] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.book = Holdings(self.room, ttl_s=TTL_S)


@dataclass
class Engine:
    """A consumer, as often as it begins, with its requests: what each waits for, and since when."""

    name: str
    room: Room = field(default_factory=lambda: Room(CAPACITY_BYTES))
    requests: dict[str, list[Input]] = field(default_factory=dict)
    asked_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.book = Reservations(self.room, ttl_s=TTL_S, wait_s=WAIT_S, max_item_bytes=LARGEST_BYTES)


Message = tuple[str, Offer | Verdict | Withdrawal | Delivery]  # to whom


class Schedule:
    """One random run. `seen` counts what happened."""

    def __init__(self, random: Random, seen: Counter[str]) -> None:
        self.random = random
        self.seen = seen
        self.now_s = 0.0
        self.number = 0
        self.encoders = {name: Encoder(name) for name in ("E1", "E2")}
        self.engines = {name: Engine(name) for name in ("PD1", "PD2")}
        self.offers = list[Offer]()
        self.network = list[Message]()

    def play(self) -> None:
        happenings: list[Callable[[], None]] = [
            *(self.announce, self.encode, self.encode, *[self.send] * 4, *[self.deliver] * 5),
            *(self.ask, self.ask, self.ask, self.begin, self.finish, self.wait),
        ]
        for _ in range(STEPS):
            rare = self.random.random() < 0.01
            (self.die if rare else self.random.choice(happenings))()
            self.collect()
            self.check()
        self.end()

    def announce(self) -> None:
        encoder = self.random.choice(list(self.encoders.values()))
        self.number += 1
        items = {item: ITEMS[item] for item in self.random.sample(list(ITEMS), self.random.randint(1, 3))}
        offers = [Offer(encoder.name, f"leg{self.number}", item, one) for item, one in items.items()]
        self.offers = [*self.offers, *offers][-5:]  # the proxy tells of all, whether there was room or not
        consumer = self.random.choice(["", *self.engines])
        for key in encoder.book.announce(f"leg{self.number}", items, self.now_s):
            if consumer:
                self.network.append((consumer, next(one for one in offers if one.key == key)))

    def encode(self) -> None:
        encoder = self.random.choice(list(self.encoders.values()))
        item = self.random.choice([name for name in ITEMS if encoder.book.expects(name)] or list(ITEMS))
        one = ITEMS[item] if self.random.random() < 0.95 else Embedding((2, 2), "F32")
        encoder.book.encoded(item, one, b"." * one.size_bytes)

    def send(self) -> None:
        """A delivery has gone out, or has failed, some time after it was begun."""
        encoder = self.random.choice(list(self.encoders.values()))
        if not encoder.sending:
            return
        delivery = encoder.sending.pop(self.random.randrange(len(encoder.sending)))
        if self.random.random() < 0.9:
            self.network.append((delivery.consumer, delivery))
        encoder.book.sent(delivery.key)

    def begin(self) -> None:
        self.number += 1
        engine = self.random.choice(list(self.engines.values()))
        offers = {one.item: one for one in self.random.sample(self.offers, min(2, len(self.offers)))}
        names = {*offers, self.random.choice(list(ITEMS))}
        inputs = [
            Input(name, ITEMS[name], True, self.random.random() < 0.7, offers.get(name)) for name in sorted(names)
        ]
        engine.requests[f"request{self.number}"] = inputs

    def ask(self) -> None:
        engine = self.random.choice(list(self.engines.values()))
        if not engine.requests:
            return
        request = self.random.choice(list(engine.requests))
        inputs = [
            one._replace(is_needed=one.is_needed and self.random.random() > 0.05) for one in engine.requests[request]
        ]
        engine.requests[request] = inputs
        began_s = engine.asked_s.setdefault(request, self.now_s)
        may_wait = self.random.random() > 0.02
        if engine.book.is_ready(request, inputs, self.now_s, may_wait=may_wait):
            self.seen["ready"] += 1
            for one in inputs:
                if engine.book.has(one.item, request) and self.random.random() < 0.8:
                    if engine.book.take(one.item, self.now_s) != (one.embedding, b"." * one.embedding.size_bytes):
                        raise Leak("other data than those that were granted")
                    self.seen["taken"] += 1
        elif self.now_s - began_s >= WAIT_S:
            raise Leak(f"a request waits for {self.now_s - began_s:g} s")

    def finish(self) -> None:
        engine = self.random.choice(list(self.engines.values()))
        if engine.requests:
            self.finish_one(engine, self.random.choice(list(engine.requests)))

    def finish_one(self, engine: Engine, request: str) -> None:
        offers = [one.offer for one in engine.requests.pop(request) if one.offer is not None]
        engine.asked_s.pop(request, None)
        engine.book.finish(request, offers, self.now_s)

    def wait(self) -> None:
        self.now_s += self.random.choice((0.1, 0.5, 4.0))
        for one in self.encoders.values():
            one.book.expire(self.now_s)

    def die(self) -> None:
        self.seen["died"] += 1
        if self.random.random() < 0.5:
            name = self.random.choice(list(self.encoders))
            self.encoders[name] = Encoder(name)
        else:
            name = self.random.choice(list(self.engines))
            self.engines[name] = Engine(name)

    def deliver(self) -> None:
        if not self.network:
            return
        at = self.random.randrange(len(self.network))
        fate = self.random.random()
        name, message = self.network[at] if fate < 0.2 else self.network.pop(at)
        if fate > 0.9:
            return
        self.seen[type(message).__name__] += 1
        if isinstance(message, Verdict):
            consumer, verdict = name.split(">")[0], message
            encoder = self.encoders[verdict.offer.producer]
            encoder.book.verdict(consumer, verdict.offer.key, is_granted=verdict.is_granted)
            return
        book = self.engines[name].book
        if isinstance(message, Offer):
            book.offer(message, self.now_s)
        elif isinstance(message, Withdrawal):
            book.withdraw(message.key, self.now_s)
        else:
            kept = book.arrive(message.key, message.embedding, message.data, self.now_s)
            self.seen["kept" if kept else "not kept"] += 1

    def collect(self) -> None:
        """What the books want to have sent goes into the network."""
        for engine in self.engines.values():
            for verdict in engine.book.verdicts:
                self.seen["granted" if verdict.is_granted else "refused"] += 1
                self.network.append((f"{engine.name}>{verdict.offer.producer}", verdict))
            engine.book.verdicts.clear()
        for encoder in self.encoders.values():
            self.network += [(one.consumer, one) for one in encoder.book.withdrawals]
            self.seen["sent"] += len(encoder.book.deliveries)
            encoder.sending += encoder.book.deliveries
            encoder.book.withdrawals.clear()
            encoder.book.deliveries.clear()

    def check(self) -> None:
        for one in self.ends():
            if not 0 <= one.room.used_bytes <= CAPACITY_BYTES:
                raise Leak(f"{one.name} has {one.room.used_bytes} bytes in a room of {CAPACITY_BYTES}")

    def ends(self) -> list[Encoder | Engine]:
        return [*self.engines.values(), *self.encoders.values()]

    def end(self) -> None:
        """All requests finish, the network falls silent, and time passes."""
        for engine in self.engines.values():
            for request in list(engine.requests):
                self.finish_one(engine, request)
        for encoder in self.encoders.values():
            for delivery in encoder.sending:
                encoder.book.sent(delivery.key)
        for _ in range(2):  # what ends is ignored for as long again
            self.now_s += TTL_S
            for engine in self.engines.values():
                engine.book.expire(self.now_s)
                engine.book.verdicts.clear()
            for encoder in self.encoders.values():
                encoder.book.expire(self.now_s)
        for one in self.ends():
            if len(one.book) or one.room.used_bytes:
                raise Leak(f"{one.name} still has {len(one.book)} entries and {one.room.used_bytes} bytes")


def play(seeds: range) -> Counter[str]:
    """What happened in the schedules of these seeds; Leak names the seed."""
    seen = Counter[str]()
    for seed in seeds:
        try:
            Schedule(Random(seed), seen).play()
        except AssertionError as exc:
            raise Leak(f"seed {seed}: {exc}") from exc
    return seen


@click.command()
@click.option("--schedules", default=100_000, show_default=True, type=click.IntRange(min=1))
@click.option("--first-seed", default=0, show_default=True)
def main(schedules: int, first_seed: int) -> None:
    """Plays so many schedules, and counts what happened in them."""
    seen = play(range(first_seed, first_seed + schedules))
    for what, count in sorted(seen.items()):
        click.echo(f"{what:12} {count:>10,}")
    click.echo(f"{schedules:,} schedules without a leak")


if __name__ == "__main__":
    main()
