"""KV handoffs as NIXL's pull connector makes them: P pins a finished prefill, D pulls it once, within a lease. Pure.

P's side is `HandoffLedger`. D's side is `read_transfer`, which recognises the `kv_transfer_params` that kill or hang a
real engine. Neither raises for a client's mistake: the mistake is counted, and it has the effect that vLLM would have.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .block_pool import Block, BlockPool
from .counters import Counters, Trap

_REMEMBERED = 1024  # closed handoffs whose end is remembered


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """A prompt's KV on P; `block_ids` are P's."""

    engine_id: str
    request_id: str
    host: str
    port: int
    block_ids: tuple[int, ...]
    prefill_cached_tokens: int | None = None  # P's own prefix-cache hits, echoed to the client
    has_heartbeat: bool = True  # vLLM sends no heartbeats if tp_size is missing


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a request's kv_transfer_params ask for; a `trap` takes effect when the request is scheduled."""

    hands_over: bool = False  # pin the blocks for a peer at the end
    remote: RemotePrefill | None = None
    trap: Trap | None = None


def read_transfer(params: dict[str, Any] | None) -> Transfer:
    """1. Nothing, or neither flag: a plain request.  2. do_remote_decode: hand over.  3. do_remote_prefill: pull.

    Traps of the third: without block ids the engine dies; without a field that names the peer the request hangs.
    """
    if not params or not (params.get("do_remote_prefill") or params.get("do_remote_decode")):
        return Transfer()
    if not params.get("do_remote_prefill"):
        return Transfer(hands_over=True)
    block_ids = _block_ids(params.get("remote_block_ids"))
    if not block_ids:
        return Transfer(trap=Trap.NO_REMOTE_BLOCKS)
    engine_id, request_id = params.get("remote_engine_id"), params.get("remote_request_id")
    host, port = params.get("remote_host"), params.get("remote_port")
    if not (engine_id and request_id and host and isinstance(port, int)):
        return Transfer(trap=Trap.NO_REMOTE_ADDRESS)
    cached = params.get("remote_prefill_cached_tokens")
    return Transfer(
        remote=RemotePrefill(
            str(engine_id),
            str(request_id),
            str(host),
            port,
            block_ids,
            prefill_cached_tokens=cached if isinstance(cached, int) else None,
            has_heartbeat=bool(params.get("tp_size")),
        )
    )


def _block_ids(groups: Any) -> tuple[int, ...]:
    if not isinstance(groups, list) or not groups or not isinstance(groups[0], list):
        return ()
    ids = groups[0]
    return tuple(ids) if all(isinstance(block_id, int) for block_id in ids) else ()


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The result of a prefill whose blocks the ledger now holds for a peer."""

    request_id: str
    block_ids: tuple[int, ...]
    tokens: int  # whose KV the blocks hold: without the last sampled token
    cached_tokens: int

    def params(self, engine_id: str, side_address: tuple[str, int]) -> dict[str, Any]:
        """P's kv_transfer_params for D, with every field that vLLM 0.33 sends."""
        host, port = side_address
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(self.block_ids)],
            "remote_engine_id": engine_id,
            "remote_request_id": self.request_id,
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": self.tokens,
            "remote_blocks_expiry_time": None,
            "remote_registration_generation": 0,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": self.cached_tokens,
        }


class _End(Enum):
    USED = Trap.USED_HANDOFF
    EXPIRED = Trap.EXPIRED_HANDOFF


@dataclass(slots=True)
class PinnedHandoff:
    """A prefill that waits to be pulled; owns a reference to each of its blocks."""

    blocks: Sequence[Block]
    pinned_at: float
    deadline: float


class HandoffLedger:
    """P's finished prefills, by the internal request id that D names. Times are those of `now`, in seconds."""

    def __init__(self, pool: BlockPool, counters: Counters, *, lease_s: float, now: Callable[[], float]) -> None:
        self._pool = pool
        self._counters = counters
        self._lease_s = lease_s
        self._now = now
        self._open: dict[str, PinnedHandoff] = {}
        self._closed: OrderedDict[str, _End] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    @property
    def pinned_blocks(self) -> int:
        return sum(len(handoff.blocks) for handoff in self._open.values())

    @property
    def next_deadline(self) -> float | None:
        return min((handoff.deadline for handoff in self._open.values()), default=None)

    def pin(self, request_id: str, blocks: Sequence[Block]) -> None:
        """Keeps `blocks` for a peer, and takes over the caller's references."""
        now = self._now()
        self._open[request_id] = PinnedHandoff(blocks, now, now + self._lease_s)
        self._counters.handoffs += 1

    def extend(self, request_id: str) -> None:
        """For D's heartbeat: the lease lasts two thirds of its length from now, or longer if it did before."""
        handoff = self._open.get(request_id)
        if handoff is not None:
            handoff.deadline = max(handoff.deadline, self._now() + self._lease_s * 2 / 3)

    def expire(self) -> int:
        """Frees handoffs whose lease is over; returns how many."""
        now = self._now()
        late = [request_id for request_id, handoff in self._open.items() if handoff.deadline <= now]
        for request_id in late:
            self._counters.expired_handoffs += 1
            self._end(request_id, _End.EXPIRED)
        return len(late)

    def read(self, request_id: str, block_ids: Sequence[int]) -> list[list[int]]:
        """The contents of P's blocks as D reads them; IndexError for an unknown block id.

        A real engine's memory stays readable after a handoff has ended, so a late read may find what other requests
        have written since. Here it always finds other contents, so that a test can rely on it.
        """
        self.expire()
        contents = [self._content(block_id) for block_id in block_ids]
        handoff = self._open.get(request_id)
        if handoff is None:
            end = self._closed.get(request_id)
            self._counters.traps[Trap.UNKNOWN_HANDOFF if end is None else end.value] += 1
            return [_overwritten(content) for content in contents]
        if not {block.id for block in handoff.blocks}.issuperset(block_ids):
            self._counters.traps[Trap.FOREIGN_BLOCKS] += 1
        return contents

    def close(self, request_id: str) -> None:
        """D's notification that it has read the blocks, or will not read them: frees them."""
        self.expire()
        if request_id in self._open:
            self._end(request_id, _End.USED)
        else:
            self._counters.notifications_after_expiry += 1

    def _end(self, request_id: str, end: _End) -> None:
        self._pool.release(self._open.pop(request_id).blocks)
        self._closed[request_id] = end
        if len(self._closed) > _REMEMBERED:
            self._closed.popitem(last=False)

    def _content(self, block_id: int) -> list[int]:
        if not 0 <= block_id < self._pool.capacity:
            raise IndexError(f"no block {block_id}")
        return list(self._pool[block_id].content)


def _overwritten(content: list[int]) -> list[int]:
    return [token ^ 0x2A for token in content]
