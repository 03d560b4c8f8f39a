from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy.errors import FormatError
from ppd.proxy.kv_events.event_batch import (
    EVENTS_LIMIT,
    CacheChange,
    Cleared,
    Removed,
    Stored,
    decode,
    rank_of,
    session_name,
)
from tests.support.announcements import stored_event

SESSION = 0x0123456789ABCDE
DIGEST = bytes(range(24)) + (7).to_bytes(8)


def packed(*events: Any, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([2.5, events, rank])


def stored(**changes: Any) -> dict[str, Any]:
    """As vLLM 0.33 writes it."""
    newest = {"kv_cache_spec_kind": "full_attention", "session_id": session_name(SESSION)}
    return stored_event(**({"block_hashes": [7, 2**64 - 1], **newest} | changes))


def as_array(event: dict[str, Any]) -> list[Any]:
    return [event["type"], *(value for name, value in event.items() if name != "type")]


def changes_of(*events: Any) -> list[tuple[Any, ...]]:
    return [plain(change) for change in decode(packed(*events)).changes]


def plain(change: CacheChange) -> tuple[Any, ...]:
    if isinstance(change, Stored):
        return list(change.hashes), change.parent, change.block_tokens, change.group, change.session
    return (list(change.hashes), change.group) if isinstance(change, Removed) else ("cleared",)


OLD = ["BlockStored", [7, 8], 3, [1, 2, 3, 4], 2, None]  # 0.9 and 0.10; 0.11 adds the medium, 0.12 more


@pytest.mark.parametrize(
    ("event", "change"),
    [
        (stored(), ([7, 2**64 - 1], None, 2, 0, SESSION)),
        (stored(parent_block_hash=5, group_idx=1, session_id="absent"), ([7, 2**64 - 1], 5, 2, 1, None)),
        (stored(session_id="a client's own"), ([7, 2**64 - 1], None, 2, 0, None)),
        (stored(block_hashes=[DIGEST, -1], parent_block_hash=DIGEST), ([7, 2**64 - 1], 7, 2, 0, SESSION)),
        (stored(medium="absent", made_up=[{}]), ([7, 2**64 - 1], None, 2, 0, SESSION)),
        (OLD, ([7, 8], 3, 2, 0, None)),
        ([*OLD, "GPU", "adapter", [["adapter"], None], 0], ([7, 8], 3, 2, 0, None)),
        (
            [*OLD, "GPU", None, None, 2, "mla_attention", None, None, None, session_name(1), "more"],
            ([7, 8], 3, 2, 2, 1),
        ),
        ({"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 1}, ([7], 1)),
        (["BlockRemoved", [DIGEST]], ([7], 0)),
        ({"type": "AllBlocksCleared"}, ("cleared",)),
        (["AllBlocksCleared"], ("cleared",)),
    ],
)
def test_both_encodings_are_read(event: Any, change: tuple[Any, ...]) -> None:
    assert changes_of(event) == [change]


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (stored(medium="CPU"), "other_medium"),
        (stored(medium="STORAGE"), "other_medium"),
        (stored(locality="REMOTE"), "other_medium"),
        (stored(ownership="tier"), "other_medium"),
        (["BlockRemoved", [7], "CPU"], "other_medium"),
        (stored(kv_cache_spec_kind="sliding_window"), "other_attention"),
        (stored(token_ids=list(range(8))), "not_contiguous"),
        ({"type": "BlockMoved"}, "unknown_type"),
        (["BlockMoved", 1], "unknown_type"),
        (5, "unknown_type"),
        (None, "unknown_type"),
        ([], "unknown_type"),
    ],
)
def test_what_is_not_in_the_engines_own_memory_is_passed_over(event: Any, why: str) -> None:
    batch = decode(packed(event, ["AllBlocksCleared"]))
    assert (batch.changes, batch.passed_over) == ([Cleared()], {why: 1})


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"garbage",
        packed(stored())[:-9],
        msgspec.msgpack.encode({"events": []}),
        msgspec.msgpack.encode([2.5]),
        msgspec.msgpack.encode([2.5, {}]),
        packed(stored(block_hashes="absent")),
        packed(stored(block_hashes=[None])),
        packed(stored(block_size=0, token_ids=[])),
        packed(stored(block_size=10**9)),
        packed(stored(token_ids={})),
        packed(["BlockStored", [1]]),
        packed({"type": "BlockRemoved"}),
    ],
)
def test_a_batch_that_cannot_be_read_whole_is_none(payload: bytes) -> None:
    with pytest.raises(FormatError):
        decode(payload)


@pytest.mark.parametrize("event", [0, {"type": "Unheard"}, {"type": "AllBlocksCleared"}, ["AllBlocksCleared"]])
@pytest.mark.parametrize("more", [0, 1])
def test_a_batch_has_so_many_events_at_most(event: Any, more: int) -> None:
    """They are counted before any is read: 32 MB of the shortest would take half a minute, and 3 GB."""
    payload = msgspec.msgpack.encode([1.0, [event] * (EVENTS_LIMIT + more), 0])
    with pytest.raises(FormatError) if more else contextlib.nullcontext():
        decode(payload)


@pytest.mark.parametrize("tokens", [1, 15, 16, 70_000])
def test_tokens_are_counted_without_being_read(tokens: int) -> None:
    event = stored(block_hashes=list(range(tokens)), block_size=1, token_ids=[9] * tokens)
    (change,) = changes_of(event)
    assert len(change[0]) == tokens


@pytest.mark.parametrize(("rank", "read"), [(None, 0), (3, 3)])
def test_the_rank_is_read_alone(rank: int | None, read: int) -> None:
    assert rank_of(packed(stored(), rank=rank)) == read


@pytest.mark.parametrize("read", [decode, rank_of])
@given(payload=st.binary(max_size=60) | st.builds(lambda tail: packed(stored())[:20] + tail, st.binary(max_size=60)))
def test_any_bytes_are_a_batch_or_refused(read: Callable[[bytes], object], payload: bytes) -> None:
    with contextlib.suppress(FormatError):
        read(payload)


def test_a_negative_rank_is_refused() -> None:
    with pytest.raises(FormatError):
        rank_of(packed(stored(), rank=-1))


def test_events_of_both_encodings_are_the_same() -> None:
    event = stored()
    full = {**event, "kv_cache_spec_sliding_window": None, "locality": None, "ownership": None}
    full["session_id"] = full.pop("session_id")
    assert changes_of(event) == changes_of(as_array(full))
