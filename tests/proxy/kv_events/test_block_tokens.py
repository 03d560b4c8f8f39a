from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd.proxy.beliefs.held import Found, Residency
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Role, Worker, WorkerId
from ppd.proxy.kv_events.block_index import FORKS_LIMIT, SWEEP_SLACK, BlockIndex
from ppd.proxy.kv_events.block_tokens import BlockTokens, PromptTokens, UnreadTokens, packed, scope_of
from ppd.proxy.kv_events.engine_caches import LATE_FOR_S, EngineCaches
from ppd.proxy.kv_events.event_batch import Cleared, Removed, Stored, decode, session_name
from ppd.proxy.kv_events.event_stream import EventStream
from tests.support.announcements import stored_event

BLOCK = 4
PLAIN = scope_of("", "")
D = Worker(role=Role.DECODE, address="127.0.0.1:8200", models=("m",))


def chained(words: Sequence[int], scope: str = PLAIN) -> list[int]:
    """Hashes of a prompt's blocks of one word each, which is repeated in its tokens."""
    return [hash((scope, *words[: end + 1])) & (2**64 - 1) for end in range(len(words))]


def ids(words: Sequence[int]) -> bytes:
    return packed([word for word in words for _ in range(BLOCK)])


def store(words: Sequence[int], start: int = 0, scope: str = PLAIN, known: int | None = None) -> Stored:
    """The blocks of a prompt from `start` on; of the first `known` of them the tokens are read."""
    hashes, tokens = chained(words, scope), [word for word in words[start:] for _ in range(BLOCK)]
    adapter, salt = scope.split("\0")
    keys: list[Any] = [[adapter] if adapter else None for _ in words[start:]]
    if salt and not start:
        keys[0] = [*(keys[0] or ()), salt]
    if known is not None:
        keys[known:] = [[["picture", 0]]] * (len(keys) - known)
    unread = UnreadTokens(*map(raw, (tokens, keys, adapter or None)))
    return Stored(array("Q", hashes[start:]), hashes[start - 1] if start else None, BLOCK, 0, None, unread)


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


def remove(words: Sequence[int], scope: str = PLAIN) -> Removed:
    return Removed(array("Q", chained(words, scope)[-1:]), 0)


HEAD = (1, 2, 3)
SALTED = scope_of("", "salt")


def test_tokens_are_bounded_however_large_blocks_are() -> None:
    index = BlockIndex(tokens_limit=8 * BLOCK, sweep_slack=0)
    for word in range(50):
        index.apply(store((word,)))
        index.apply(remove((word,)))
    assert not index.is_full, "what is forgotten leaves room"
    index.apply(store(HEAD))
    assert index.held_of(ids(HEAD), PLAIN) == 3 * BLOCK
    index.apply(store((*HEAD, *range(9)), 3))
    assert index.is_full and index.held_of(ids(HEAD), PLAIN) is None
    index.apply(Cleared())
    index.apply(store(HEAD))
    assert index.held_of(ids(HEAD), PLAIN) == 3 * BLOCK


@pytest.mark.parametrize(
    ("changes", "words", "blocks"),
    [
        ([], (1, 2), 0),
        ([store(HEAD)], (1, 2, 3, 9), 3),
        ([store(HEAD)], (1, 2, 9), 2),
        ([store(HEAD)], (9, 1, 2), 0),
        ([store(HEAD), store((1, 2, 3, 4, 5), 3)], (1, 2, 3, 4, 9), 4),
        ([store(HEAD), store((1, 2, 7, 8), 2)], (1, 2, 7, 8), 4),
        ([store(HEAD), store((1, 2, 7, 8), 2)], (1, 2, 3, 8), 3),
        ([store(HEAD), store((1, 2, 7), 2), store((1, 2, 7, 6), 3), store((1, 2, 7, 5), 3)], (1, 2, 7, 5), 4),
        ([store(HEAD), store((8, 9))], (8, 9), 2),
        ([store(HEAD), remove((1, 2))], HEAD, 1),
        ([store(HEAD), store((1, 2, 7), 2), remove((1, 2))], (1, 2, 7), 1),
        ([store(HEAD), remove((1, 2)), store((1, 2), 1)], HEAD, 3),
        ([store(HEAD), Cleared()], HEAD, 0),
        ([store(HEAD), Cleared(), store(HEAD)], HEAD, 3),
        ([store(HEAD, scope=SALTED)], HEAD, 0),
        ([store(HEAD, known=2)], HEAD, 2),  # a picture in the third block
        ([store(HEAD, known=2), store((1, 2, 3, 4), 3)], (1, 2, 3, 4), 2),
        ([store(HEAD, known=0), store((1, 2, 3, 4), 3)], (1, 2, 3, 4), 0),
        ([store(HEAD, known=1), store((1, 2, 7), 2)], (1, 2, 7), 1),
    ],
)
def test_any_prompt_is_found_by_its_tokens(changes: list[Any], words: tuple[int, ...], blocks: int) -> None:
    index = BlockIndex()
    for change in changes:
        assert index.apply(change) is None
    assert index.held_of(ids(words), PLAIN) == blocks * BLOCK


def test_prompts_of_other_salts_and_adapters_are_other_prompts() -> None:
    index, scopes = BlockIndex(), [PLAIN, SALTED, scope_of("", "other"), scope_of("adapter", "")]
    index.apply(store(HEAD, scope=SALTED))
    assert [index.held_of(ids(HEAD), scope) for scope in scopes] == [0, 3 * BLOCK, 0, 0]
    index.apply(store((1, 2), scope=PLAIN))
    index.apply(store((1, 2, 9), 2, scope=PLAIN))
    assert [index.held_of(ids((1, 2, 9)), scope) for scope in scopes] == [3 * BLOCK, 2 * BLOCK, 0, 0]


def test_what_is_swept_is_not_found_and_leaves_no_branch() -> None:
    index = BlockIndex(sweep_slack=0)
    index.apply(store(HEAD))
    for number in range(50):
        words = (*HEAD, 100 + number, 7)
        index.apply(store(words, 3))
        index.apply(remove(words))
        index.apply(remove(words[:4]))
        assert index.held_of(ids(words), PLAIN) == 3 * BLOCK
    assert len(index._branches) <= 3


def test_a_prompt_that_forks_at_each_block_takes_no_longer_than_any() -> None:
    index, blocks = BlockIndex(), 600

    def one(block: int, word: int, parent: int | None) -> Stored:
        unread = UnreadTokens(raw([word] * BLOCK), raw([None]), raw(None))
        return Stored(array("Q", [block]), parent, BLOCK, 0, None, unread)

    for block in range(1, blocks + 1):
        parent = block - 1 or None
        index.apply(one(10_000 + block, 7, parent))  # another prompt goes on first
        index.apply(one(block, block % 5, parent))
    assert index.held_of(ids([block % 5 for block in range(1, blocks + 1)]), PLAIN) == FORKS_LIMIT * BLOCK


@pytest.mark.slow
@pytest.mark.parametrize("sweep_slack", [0, SWEEP_SLACK])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_tokens_find_what_is_there_as_chains_written_out_do(sweep_slack: int, data: st.DataObject) -> None:
    index, there = BlockIndex(sweep_slack=sweep_slack), set[tuple[int, ...]]()
    prompt = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
    for _ in range(data.draw(st.integers(5, 25))):
        if data.draw(st.integers(0, 2)) or not there:
            words = data.draw(prompt)
            starts = [end for end in range(1, len(words)) if words[:end] in there]
            index.apply(store(words, data.draw(st.sampled_from([0, *starts]))))
            there.update(words[:end] for end in range(1, len(words) + 1))
        else:
            gone = data.draw(st.sampled_from(sorted(there)))
            index.apply(remove(gone))
            there.discard(gone)
        asked = data.draw(prompt)
        blocks = next((end for end in range(len(asked)) if asked[: end + 1] not in there), len(asked))
        assert index.held_of(ids(asked), PLAIN) == blocks * BLOCK


def event(**changes: Any) -> dict[str, Any]:
    return stored_event(**({"token_ids": [1, 2, 70_000, 4]} | changes))


def read(one: Any, *, reads_tokens: bool = True) -> BlockTokens | None:
    (change,) = decode(msgspec.msgpack.encode([0.0, [one], 0]), reads_tokens=reads_tokens).changes
    assert isinstance(change, Stored)
    return None if change.tokens is None else change.tokens.read(len(change.hashes), opens=change.parent is None)


ALL, FIRST = packed([1, 2, 70_000, 4]), packed([1, 2])


@pytest.mark.parametrize(
    ("one", "tokens", "scope"),
    [
        (event(), ALL, PLAIN),
        (event(parent_block_hash=3), ALL, ""),
        (event(extra_keys=[["salt"], None]), ALL, SALTED),
        (event(extra_keys=[[["cache_salt", "salt"]], None]), ALL, SALTED),
        (event(lora_name="a", extra_keys=[["a"], ["a"]]), ALL, scope_of("a", "")),
        (event(lora_name="a", extra_keys=[["a", "salt"], ["a"]]), ALL, scope_of("a", "salt")),
        (event(lora_name="a", extra_keys=[[["lora", "a", "/path"]], [["lora", "a", "/path"]]]), ALL, scope_of("a", "")),
        (event(extra_keys=[None, [["picture", 0]]]), FIRST, PLAIN),
        (event(extra_keys=[None, ["salt"]]), FIRST, PLAIN),  # none but the first block names it
        (event(parent_block_hash=3, extra_keys=[None, ["digest"]]), FIRST, ""),
        (event(extra_keys=[["picture", "salt"], None]), b"", ""),
        (event(extra_keys=[[["cache_salt", 3]], None]), b"", ""),  # a picture whose client named it so
        (event(lora_name="a"), b"", ""),
        (event(extra_keys="absent"), b"", ""),  # an older engine does not say whose salt it is
        (event(extra_keys=None), b"", ""),
        (event(extra_keys=[None]), b"", ""),
        (event(extra_keys=7), b"", ""),
        (event(token_ids=[1, 2, 3, -4]), b"", ""),
        (event(token_ids=[1, 2, 3, 2**40]), b"", ""),
        (event(token_ids=["a", "b", "c", "d"]), b"", ""),
        (["BlockStored", [7, 8], None, [1, 2, 70_000, 4], 2, None, "GPU", None, [["salt"], None], 0], ALL, SALTED),
        (["BlockStored", [7, 8], None, [1, 2, 70_000, 4], 2, None, "GPU"], b"", ""),
    ],
)
def test_a_block_is_known_by_its_tokens_if_nothing_else_is_in_its_hash(one: Any, tokens: bytes, scope: str) -> None:
    found = read(one)
    assert found is not None
    assert (found.ids, found.scope) == (tokens, scope)


def test_tokens_are_read_only_where_they_are_asked_for() -> None:
    assert read(event(), reads_tokens=False) is None


def payload(words: Sequence[int], **changes: Any) -> bytes:
    tokens = [word for word in words for _ in range(BLOCK)]
    one = event(block_hashes=chained(words), token_ids=tokens, block_size=BLOCK, extra_keys=[None] * len(words))
    return msgspec.msgpack.encode([1.0, [one | changes], 0])


def views(*workers: Worker) -> dict[WorkerId, WorkerView]:
    registry = Registry()
    for one in workers:
        registry.add_static(one, 0.0)
    return {view.id: view for view in registry.views()}


def taken(stream: EventStream, *batches: tuple[int, bytes]) -> None:
    for number, batch in batches:
        if stream.expected is None and number:
            stream.resume(number)
        stream.take(number, batch)
    stream.is_behind = False


def test_a_worker_holds_what_it_published_whoever_used_it() -> None:
    caches = EngineCaches(lambda history: history, reads_tokens=True)
    taken(caches.stream(D.id, 0), (0, payload(HEAD)))
    asked = [(1, 2, 3, 9), HEAD, (9, 9)]
    found = [caches.found(PromptTokens(ids(words)), "m", views(D), None, None, 0.0) for words in asked]
    # Of a prompt that is there as a whole, the engine computes the last block again.
    assert found == [{D.id: Found(tokens, is_exact=True)} for tokens in (3 * BLOCK, 2 * BLOCK, 0)]
    assert caches.found(PromptTokens(ids(HEAD), "salt"), "m", views(D), None, None, 0.0) == {
        D.id: Found(0, is_exact=True)
    }
    assert caches.found(PromptTokens(ids(HEAD)), "m", {}, None, None, 0.0) == {}


def test_after_a_gap_what_is_not_known_may_be_there() -> None:
    caches = EngineCaches(lambda history: history, reads_tokens=True)
    stream = caches.stream(D.id, 0)
    taken(stream, (7, payload(HEAD)))
    prompt = PromptTokens(ids((1, 2, 3, 9)))
    assert caches.found(prompt, "m", views(D), None, None, 0.0) == {D.id: Found(3 * BLOCK, is_exact=False)}
    stream.take(8, msgspec.msgpack.encode([2.0, [["AllBlocksCleared"]], 0]))
    assert caches.found(prompt, "m", views(D), None, None, 0.0) == {D.id: Found(0, is_exact=True)}
    stream.lost()
    assert caches.found(prompt, "m", views(D), None, None, 0.0) == {D.id: Found(0, is_exact=False)}
    stream.is_behind = True
    assert caches.found(prompt, "m", views(D), None, None, 0.0) == {}


@pytest.mark.parametrize(("version", "is_exact"), [("", False), ("0.30.1", False), ("0.29.0", True)])
def test_events_of_a_sessions_newest_turn_may_be_under_way(version: str, is_exact: bool) -> None:
    """Until events have named the session, less is known of it than its own turns tell; if they ever name any."""
    caches, worker = EngineCaches(lambda history: history, reads_tokens=True), replace(D, engine_version=version)
    taken(caches.stream(D.id, 0), (0, payload((9,))))
    prompt = PromptTokens(ids(HEAD))
    assert caches.found(prompt, "m", views(worker), 5, None, 0.0) == {D.id: Found(0, is_exact=is_exact)}
    caches.stream(D.id, 0).take(1, payload((1,), session_id=session_name(5)))
    assert caches.found(prompt, "m", views(worker), 5, None, 0.0) == {D.id: Found(BLOCK, is_exact=True)}


@pytest.mark.parametrize(
    ("last", "is_exact"),
    [
        (None, True),
        (Residency(D.id, "i", 3 * BLOCK), True),  # its last block may stay unannounced
        (Residency(D.id, "i", 4 * BLOCK), False),
        (Residency(WorkerId("elsewhere:1"), "i", 4 * BLOCK), True),
    ],
)
def test_until_events_tell_of_the_newest_turn_the_worker_may_hold_more(last: Residency | None, is_exact: bool) -> None:
    caches = EngineCaches(lambda history: history, reads_tokens=True)
    taken(caches.stream(D.id, 0), (0, payload((1,), session_id=session_name(5))))
    found = caches.found(PromptTokens(ids(HEAD)), "m", views(D), 5, last, 0.0)
    assert found == {D.id: Found(BLOCK, is_exact=is_exact)}


def test_a_worker_whose_events_come_late_says_nothing_of_any_prompt() -> None:
    caches, prompt = EngineCaches(lambda history: history, reads_tokens=True), PromptTokens(ids(HEAD))
    taken(caches.stream(D.id, 0), (0, payload((1,))))
    caches.stored(D.id, 6, 100 * BLOCK, 100 * BLOCK, 10.0)
    assert caches.found(prompt, "m", views(D), None, None, 10.0) == {D.id: Found(BLOCK, is_exact=True)}
    assert caches.found(prompt, "m", views(D), None, None, 11.0) == {}
    assert caches.found(prompt, "m", views(D), None, None, 11.0 + LATE_FOR_S) == {D.id: Found(BLOCK, is_exact=True)}


def test_of_several_ranks_the_least_counts() -> None:
    caches = EngineCaches(lambda history: history, reads_tokens=True)
    for rank, words in enumerate([HEAD, (1, 2)]):
        taken(caches.stream(D.id, rank), (0, payload(words)))
    assert caches.found(PromptTokens(ids((1, 2, 3, 9))), "m", views(D), None, None, 0.0) == {
        D.id: Found(2 * BLOCK, is_exact=True)
    }


@pytest.mark.parametrize(
    ("models", "aliases", "model", "found"),
    [
        (("m",), {}, "m", 2 * BLOCK),
        (("m", "m-latest"), {"m-latest": "m"}, "m-latest", 2 * BLOCK),
        (("m", "a"), {}, "a", BLOCK),
        (("m", "a", "b"), {}, "b", None),  # an adapter of which nothing was heard, or the model itself
    ],
)
def test_an_adapters_blocks_are_its_own(
    models: tuple[str, ...], aliases: dict[str, str], model: str, found: int | None
) -> None:
    worker = Worker(role=Role.DECODE, address=D.address, models=models, aliases=aliases)
    caches = EngineCaches(lambda history: history, reads_tokens=True)
    adapted = payload((1,), block_hashes=[5], lora_name="a", extra_keys=[["a"]])
    taken(caches.stream(D.id, 0), (0, payload((1, 2))), (1, adapted))
    told = caches.found(PromptTokens(ids((1, 2, 3))), model, views(worker), None, None, 0.0)
    assert told == ({} if found is None else {D.id: Found(found, is_exact=True)})
