"""Receipts of turns, whichever of the proxy's processes had them."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest
from typing import TYPE_CHECKING

import msgspec

from ..telemetry.receipts import Receipt, Receipts

if TYPE_CHECKING:
    from ..assembly import Proxy

_DECODER = msgspec.msgpack.Decoder(list[Receipt])


async def find(proxy: Proxy, request_id: str) -> Receipt | None:
    found = proxy.state.receipts.find(request_id)
    if found is not None:
        return found
    others = await proxy.siblings.ask_others("receipt", request_id.encode())
    return next((receipt for body in others.values() for receipt in _DECODER.decode(body)), None)


async def newest(proxy: Proxy, limit: int) -> list[Receipt]:
    """The newest first."""
    others = await proxy.siblings.ask_others("receipts", str(limit).encode())
    receipts = [
        *proxy.state.receipts.newest(limit),
        *(one for body in others.values() for one in _DECODER.decode(body)),
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
