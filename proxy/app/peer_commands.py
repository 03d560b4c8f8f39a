"""What the operator's API needs from the proxy's other processes: changes to workers and weights, and receipts.

The leader makes changes; the other processes send it the command. A receipt is kept by the process that served the
turn, so a process asks the others for the receipts that it does not have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from heapq import nlargest
from typing import TYPE_CHECKING

import msgspec

from ..config import convert
from ..discovery.static_workers import parse_worker
from ..errors import NotFound, RequestError
from ..fleet.view import WorkerView
from ..fleet.worker import Source
from ..settings import check_table
from ..telemetry.receipts import Receipt, Receipts

if TYPE_CHECKING:
    from ..assembly import Proxy


WRITTEN_AT_ONCE = 32  # receipts, before other turns go on


class Add(msgspec.Struct, tag=True, frozen=True):
    """A worker in the config's own notation."""

    worker: str


class SetDraining(msgspec.Struct, tag=True, frozen=True):
    """draining: the worker gets no new turns."""

    worker_id: str
    draining: bool


class Remove(msgspec.Struct, tag=True, frozen=True):
    worker_id: str


Command = Add | SetDraining | Remove

_COMMAND = msgspec.msgpack.Decoder(Command)
_RECEIPTS = msgspec.msgpack.Decoder(list[Receipt])


async def send_command(proxy: Proxy, command: Command) -> str:
    """Has the leader run the command. Returns the worker's id; PPDError if it can't be done."""
    return (await proxy.membership.ask_leader("workers", msgspec.msgpack.encode(command))).decode()


def run_command(proxy: Proxy, command: bytes) -> bytes:
    """Runs in the leader; returns the worker's id."""
    registry = proxy.state.registry
    wanted = _COMMAND.decode(command)
    if isinstance(wanted, Add):
        worker = parse_worker(wanted.worker)
        proxy.state.laws.profiles.add(worker.profile)
        proxy.settings.added.add(worker.id)
        proxy.settings.overrule(worker.id)
        registry.add_static(worker, proxy.state.now())
        proxy.membership.workers_added(proxy.settings.added, proxy.settings.overruled)
        proxy.prober.nudge()
        return worker.id.encode()
    view = find_worker(proxy, wanted.worker_id)
    if isinstance(wanted, SetDraining):
        registry.hold_back(view.id, wanted.draining)
    elif view.worker.source is not Source.STATIC:
        raise RequestError("this worker announces itself: stop its agent, or drain it", param="worker_id")
    else:
        proxy.settings.added.discard(view.id)
        proxy.settings.overrule(view.id)
        proxy.membership.workers_added(proxy.settings.added, proxy.settings.overruled)
        registry.remove(view.id)
    return view.id.encode()


def change_weights(proxy: Proxy, changes: bytes) -> bytes:
    """Runs in the leader, so that of two operators' changes, and one of the file, all processes have the same last."""
    wanted = convert(msgspec.msgpack.decode(changes, type=dict[str, object]))
    if "table" in wanted:
        check_table(wanted["table"])
    proxy.change(wanted)
    proxy.membership.config_changed(wanted)
    return b""


def find_worker(proxy: Proxy, worker_id: str) -> WorkerView:
    """worker_id: its id or its name."""
    for view in proxy.state.registry.views():
        if worker_id in (view.id, view.name):
            return view
    raise NotFound(f"no worker {worker_id!r}", param="worker_id")


# -- receipts, of whichever process


async def find_receipt(proxy: Proxy, request_id: str) -> Receipt | None:
    found = proxy.state.receipts.find(request_id)
    if found is not None:
        return found
    others = await proxy.membership.ask_others("receipt", request_id.encode())
    return next((receipt for body in others.values() for receipt in _RECEIPTS.decode(body)), None)


async def newest_receipts(proxy: Proxy, limit: int) -> list[Receipt]:
    others = await proxy.membership.ask_others("receipts", str(limit).encode())
    receipts = [one for body in others.values() for one in _RECEIPTS.decode(body)]
    for receipt in proxy.state.receipts.one_by_one(limit):
        receipts.append(receipt)
        if len(receipts) % WRITTEN_AT_ONCE == 0:
            await asyncio.sleep(0)
    return nlargest(limit, receipts, key=lambda receipt: receipt.at) if others else receipts


def answer_receipt(receipts: Receipts, request_id: bytes) -> bytes:
    found = receipts.find(request_id.decode())
    return _encoded([found] if found is not None else [])


def answer_receipts(receipts: Receipts, limit: bytes) -> bytes:
    return _encoded(receipts.newest(int(limit)))


def _encoded(receipts: Iterable[Receipt]) -> bytes:
    return msgspec.msgpack.encode(list(receipts))
