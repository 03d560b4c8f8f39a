"""KV handoffs: P pins a finished prefill, and D pulls it once, within a lease. Pure.

`Transfer` is what a request asks for, as a protocol of `protocols` reads it. `HandoffLedger` is P's side. It does not
raise for a mistake of D's: the mistake is counted, and it has the effect that it has with NIXL on vLLM.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from .block_pool import Block, BlockPool
from .counters import Counters, Trap

_REMEMBERED = 1024  # closed handoffs whose end is remembered


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """A prompt's KV on P; `block_ids` are P's. `host` and `port` are those of P's side channel."""

    engine_id: str  # empty: D is not told
    request_id: str
    host: str
    port: int
    block_ids: tuple[int, ...] | None  # None: P says which, once the legs have met by their key
    prefill_cached_tokens: int | None = None  # P's own prefix-cache hits, echoed to the client
    has_heartbeat: bool = True  # vLLM sends no heartbeats if tp_size is missing
    kept_until: float | None = None  # of what a D keeps: by the engines' clock


@dataclass(frozen=True, slots=True)
class KvSource:
    """A peer's side channel, and the key under which it is asked once."""

    key: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one sequence's request asks for; a `trap` takes effect when the sequence is scheduled."""

    hands_over: bool = False  # pin the blocks for a peer at the end
    remote: RemotePrefill | None = None
    read_back: int | None = None  # tokens at the prompt's start that `remote`, a D, has; None: it has all of the prompt
    trap: Trap | None = None
    key: str = ""  # by which the two legs meet; empty: D's request names P's blocks
    only_at_length: bool = False  # P hands nothing over if the answer stops before its limit
    ends_after_prefill: bool = False  # P's role ends the answer after one token, whatever the request says
    stops: bool = False  # by a fault: its first token ends the answer
    is_absent: bool = False  # by a fault: the other leg waits for it in vain
    pulls_all: bool = False  # D does not look into its own prefix cache
    recomputes: bool = False  # D computes what P does not have, whatever its load failure policy
    receiver: tuple[str, int] | None = None  # host and port of a peer to which P sends the prompt's KV
    source: KvSource | None = None  # a peer whose cache P looks into before it computes
    is_sent: bool = False  # P sends it for D's leg with this key, before P answers; D waits within its step

    @property
    def meeting(self) -> str:
        """Where it waits for the other leg; one that is kept away is alone there."""
        return f"{self.key} without {'P' if self.hands_over else 'D'}" if self.is_absent else self.key


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The result of a prefill whose blocks the ledger now holds for a peer."""

    request_id: str
    block_ids: tuple[int, ...]
    tokens: int  # whose KV the blocks hold: without the last sampled token
    cached_tokens: int
    key: str = ""  # of the transfer
    first_token: int = 0  # of the answer
    kept_until: float | None = None  # of what a D keeps for a P to read back


class _End(Enum):
    USED = Trap.USED_HANDOFF
    EXPIRED = Trap.EXPIRED_HANDOFF


@dataclass(slots=True)
class PinnedHandoff:
    """A prefill that waits to be pulled; owns a reference to each of its blocks."""

    blocks: Sequence[Block]
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
        self._pin(request_id, blocks, self._lease_s)
        self._counters.handoffs += 1

    def keep(self, request_id: str, blocks: Sequence[Block], keeps_s: float) -> float:
        """As `pin`, of a D's answer with its prompt; until when."""
        self._counters.kept_answers += 1
        return self._pin(request_id, blocks, keeps_s)

    def _pin(self, request_id: str, blocks: Sequence[Block], for_s: float) -> float:
        deadline = self._now() + for_s
        self._open[request_id] = PinnedHandoff(blocks, deadline)
        return deadline

    def extend(self, request_id: str) -> None:
        """For D's heartbeat: the lease lasts two thirds of its length from now, or longer if it did before."""
        handoff = self._open.get(request_id)
        if handoff is not None:
            handoff.deadline = max(handoff.deadline, self._now() + self._lease_s * 2 / 3)

    def end_lease(self, request_id: str) -> None:
        self._open[request_id].deadline = self._now()

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
