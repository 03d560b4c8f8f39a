"""What an operator may do to workers, by the one process that watches them; the others pass it on."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest
from typing import TYPE_CHECKING

import msgspec

from ..discovery.static_workers import parse_worker
from ..errors import NotFound, RequestError
from ..fleet.view import WorkerView
from ..fleet.worker import Source
from ..telemetry.receipts import Receipt, Receipts

if TYPE_CHECKING:
    from ..assembly import Proxy


class Add(msgspec.Struct, tag=True, frozen=True):
    """A worker in the config's own notation."""

    worker: str


class SetDraining(msgspec.Struct, tag=True, frozen=True):
    """Give it no new turns, or again."""

    worker_id: str
    draining: bool


class Remove(msgspec.Struct, tag=True, frozen=True):
    worker_id: str


Command = Add | SetDraining | Remove

_COMMAND = msgspec.msgpack.Decoder(Command)


async def give(proxy: Proxy, command: Command) -> str:
    """Has it done, and returns the worker's id; PPDError where it can't be."""
    return (await proxy.siblings.ask_leader("workers", msgspec.msgpack.encode(command))).decode()


def obey(proxy: Proxy, command: bytes) -> bytes:
    """Does it, in the process that leads."""
    registry = proxy.state.registry
    order = _COMMAND.decode(command)
    if isinstance(order, Add):
        worker = parse_worker(order.worker)
        proxy.settings.added.add(worker.id)
        registry.add_static(worker, proxy.state.now())
        proxy.siblings.added(proxy.settings.added)
        proxy.prober.nudge()
        return worker.id.encode()
    view = known(proxy, order.worker_id)
    if isinstance(order, SetDraining):
        registry.hold_back(view.id, order.draining)
    elif view.worker.source is not Source.STATIC:
        raise RequestError("this worker announces itself: stop its agent, or drain it", param="worker_id")
    else:
        proxy.settings.added.discard(view.id)
        proxy.siblings.added(proxy.settings.added)
        registry.remove(view.id)
    return view.id.encode()


def known(proxy: Proxy, worker_id: str) -> WorkerView:
    """By id or by name; NotFound."""
    for view in proxy.state.registry.views():
        if worker_id in (view.id, view.name):
            return view
    raise NotFound(f"no worker {worker_id!r}", param="worker_id")


if TYPE_CHECKING:
    from ..assembly import Proxy

_RECEIPTS = msgspec.msgpack.Decoder(list[Receipt])


async def find(proxy: Proxy, request_id: str) -> Receipt | None:
    found = proxy.state.receipts.find(request_id)
    if found is not None:
        return found
    others = await proxy.siblings.ask_others("receipt", request_id.encode())
    return next((receipt for body in others.values() for receipt in _RECEIPTS.decode(body)), None)


async def newest(proxy: Proxy, limit: int) -> list[Receipt]:
    """The newest first."""
    others = await proxy.siblings.ask_others("receipts", str(limit).encode())
    receipts = [
        *proxy.state.receipts.newest(limit),
        *(one for body in others.values() for one in _RECEIPTS.decode(body)),
    ]
    return nlargest(limit, receipts, key=lambda receipt: receipt.at) if others else receipts


def one(receipts: Receipts, request_id: bytes) -> bytes:
    """What another process is answered."""
    found = receipts.find(request_id.decode())
    return _encoded([found] if found is not None else [])


def some(receipts: Receipts, limit: bytes) -> bytes:
    return _encoded(receipts.newest(int(limit)))


def _encoded(receipts: Iterable[Receipt]) -> bytes:
    return msgspec.msgpack.encode(list(receipts))
