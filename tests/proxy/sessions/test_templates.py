"""What is known of chat templates: whose print ids, and in which order they render tools and the system's text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from ppd.proxy.config import ProxyConfig
from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.sessions.hasher import Hasher, Units
from ppd.proxy.sessions.prefix_chain import Chain, Marks
from ppd.proxy.sessions.prompt_head import Head
from ppd.proxy.sessions.templates import (
    HEADS_LIMIT,
    MODELS_LIMIT,
    PARTS_LIMIT,
    RECENT_TOKENS,
    UNITS_LIMIT,
    Claim,
    NewHeads,
    TemplateOrder,
    Templates,
    vote,
)

DEFAULT = ProxyConfig().templates_with_call_ids
W, V = WorkerId("10.0.0.1:8000"), WorkerId("10.0.0.2:8000")


@pytest.mark.parametrize(
    ("names", "prints"),
    [
        (["mistralai/Mistral-Small-3.2"], True),
        (["Mixtral-8x7B-Instruct"], True),
        (["moonshotai/Kimi-K2-Instruct"], True),
        (["chat", "kimi-k2"], True),
        (["chat"], False),
        (["Qwen/Qwen3-8B"], False),
        (["meta-llama/Llama-3.1-8B-Instruct", "llama"], False),
        ([], False),
    ],
)
def test_models_whose_templates_print_ids_are_known_by_any_of_their_names(names: list[str], prints: bool) -> None:
    assert Templates(DEFAULT).of(*names).prints_call_ids is prints
    assert not Templates().of(*names).prints_call_ids
    assert Templates(("*",)).of(*names).prints_call_ids is bool(names)


@pytest.mark.parametrize(
    ("cached", "tools_first", "system_first", "expected"),
    [
        # Another system's text after 4,000 tokens of tools; 1,000 tokens of text, of which any part may be the same.
        (4000, (4000, 5000), (0, 1000), 3),
        (4300, (4000, 5000), (0, 1000), 3),
        (0, (4000, 5000), (0, 1000), -1),
        (900, (4000, 5000), (0, 1000), -1),
        (2500, (4000, 5000), (0, 1000), 0),  # part of it was evicted
        (4900, (4000, 5000), (0, 1000), 0),  # all of the head is there
        (4700, (0, 500), (4600, 5000), -1),  # but a tool at its end, as expected
        # Another first tool, of 500 tokens, after 1,000 tokens of text.
        (1000, (0, 500), (1000, 1500), -3),
        (0, (0, 500), (1000, 1500), 1),
        (1300, (0, 500), (1000, 1500), -3),
        # Another tool at the end, after 1,500 tokens of tools and 1,000 of text.
        (2500, (1500, 2000), (2500, 3000), -1),
        (1500, (1500, 2000), (2500, 3000), 3),
        # Text and tools of one size: a common beginning of the text looks like the tools.
        (1000, (1000, 2000), (0, 1000), 0),
        # Nothing of this head was seen before.
        (0, (0, 1000), (0, 1000), 0),
        (700, (0, 1000), (0, 1000), 0),
    ],
)
def test_what_one_turn_says_about_the_order(
    cached: int, tools_first: tuple[float, float], system_first: tuple[float, float], expected: int
) -> None:
    assert vote(cached, 5000, Claim(*tools_first), Claim(*system_first)) == expected


HASHER = Hasher(b"a secret of the proxy")
TEXT, TOOL, MESSAGE = 4000, 2000, 800  # bytes of a system's text, of a tool, and of what follows the head


def prompt(system: str, tools: str, *, tools_first: bool | None = None, text_bytes: int = TEXT) -> Chain:
    """A prompt with this text of a system and one tool for each letter."""
    key, keys = 0, list[int]()
    for name in tools:
        key = HASHER.key(b"O", name, previous=key)
        keys.append(key)
    ends = tuple(range(TOOL, TOOL * len(keys) + 1, TOOL))
    head = Head(7, 0, Units(tuple(keys), ends), tools_first)
    chain, sizes, size = head.chain((HASHER.key(b"U", system, previous=7), text_bytes) if system else None)
    marks = head.marks(has_system=bool(system))
    return Chain((*chain, chain[-1] ^ 1), (*sizes, size + MESSAGE), HASHER, marks=marks)


class Engine:
    """A worker's cache, for a template of the one order or the other."""

    def __init__(self, *, tools_first: bool, forgets: bool = False) -> None:
        self.tools_first = tools_first
        self.forgets = forgets
        self._cached = set[int]()

    def ask(self, chain: Chain) -> tuple[int, int]:
        """Tokens of the prompt, and those found cached, in blocks of 16."""
        keys, ends = chain.head(tools_first=self.tools_first)
        known = (
            0 if self.forgets else max(end for key, end in zip(keys, ends, strict=True) if key in self._cached | {7})
        )
        self._cached.update(keys)
        return chain.size // 4, known // 4 // 16 * 16


def taught(engine: Engine, heads: Iterable[tuple[str, str]], order: TemplateOrder | None = None) -> bool | None:
    """Whether it is believed in the end that the tools are first; None: nothing is known."""
    order = order or TemplateOrder()
    for system, tools in heads:
        chain = prompt(system, tools, tools_first=order.known.of("m").tools_first)
        order.learn("m", W, chain, *engine.ask(chain))
    return order.known.of("m").tools_first


TRAFFIC = {
    "other texts": [(str(at), "abcdef") for at in range(5)],
    "other first tools": [("s", f"{at}bcdef") for at in range(5)],
    "tools added": [("s", "abcdefghi"[: 3 + at]) for at in range(5)],
    "other last tools": [("s", f"abcde{at}") for at in range(5)],
    "either": [("s", "abc"), ("t", "abc"), ("t", "dbc"), ("u", "dbc"), ("u", "ebc"), ("v", "ebc")],
}


@pytest.mark.parametrize("tools_first", [False, True])
@pytest.mark.parametrize("traffic", TRAFFIC)
def test_the_order_is_learned_where_only_one_of_the_two_changed(traffic: str, tools_first: bool) -> None:
    order = TemplateOrder()
    order.learn("m", V, prompt("0", "abc"), 100, 0)
    assert taught(Engine(tools_first=tools_first), TRAFFIC[traffic], order) is tools_first


def test_a_wrong_belief_is_corrected() -> None:
    order = TemplateOrder()
    assert taught(Engine(tools_first=True), TRAFFIC["other texts"], order)
    assert not taught(Engine(tools_first=False), [("x", f"{at}yz") for at in range(9)], order)
    assert taught(Engine(tools_first=True), [(f"y{at}", "hijklm") for at in range(9)], order)


@pytest.mark.parametrize(
    "heads",
    [
        [("s", "abcdef")] * 9,  # the same again
        [(str(at), f"{at}bcdef") for at in range(9)],  # both changed
        [("", "abcdef"), ("", "bcdef")] * 4,  # no system's text
        [("s", ""), ("t", "")] * 4,  # no tools
        [(str(at), "a" * UNITS_LIMIT) for at in range(9)],  # more units than are looked at
    ],
)
def test_nothing_is_learned_of_other_turns(heads: list[tuple[str, str]]) -> None:
    for forgets in (False, True):
        assert not taught(Engine(tools_first=True, forgets=forgets), heads)


@pytest.mark.parametrize("processes", [1, 4])
def test_workers_know_what_they_themselves_have_seen_of_late(processes: int) -> None:
    order, chain = TemplateOrder(processes=processes), prompt("s", "abcdef")
    tokens, tools = chain.size // 4, 6 * TOOL // 4
    assert not order.learn("m", W, chain, tokens, 0)
    assert not order.learn("m", V, prompt("t", "abcdef"), tokens, tools), "another worker"
    order.computed(W, RECENT_TOKENS // processes)
    assert not order.learn("m", W, prompt("t", "abcdef"), tokens, tools), "so much was computed since"
    assert not order.learn("m", W, prompt("u", "abcdef"), tokens, None), "not told"
    assert order.learn("m", W, prompt("v", "abcdef"), tokens, tools)
    assert order.known.of("m").tools_first and not order.known.of("n").tools_first


def test_votes_of_other_processes_are_added_to() -> None:
    order = TemplateOrder()
    order.adopt("m", 2)
    assert not order.known.tools_first
    assert taught(Engine(tools_first=True, forgets=True), [("s", f"{at}bc") for at in range(2)], order)
    assert order.scores() == [("m", 3)]
    assert order.known.of("m").tools_first
    order.adopt("m", -3)
    assert order.known.of("m").tools_first is False and order.known.of("n").tools_first is None


class Others:
    """The other processes, which take what one tells."""

    def __init__(self, orders: Sequence[TemplateOrder]) -> None:
        self._orders = orders

    def catch_up(self) -> None: ...

    def changed(self, new: NewHeads) -> None:
        for order in self._orders:
            order.take(new)


@pytest.mark.parametrize("tools_first", [False, True])
@pytest.mark.parametrize("traffic", [*TRAFFIC.values(), [("s", "abc"), ("t", "abd"), ("u", "abe"), ("v", "abf")]])
def test_processes_learn_from_each_others_turns(traffic: list[tuple[str, str]], tools_first: bool) -> None:
    """Where each knows only of its own turns, it learns less, and takes what others have had computed for a text."""
    one, orders = TemplateOrder(), [TemplateOrder(processes=2) for _ in range(2)]
    for order, other in (orders, orders[::-1]):
        order.replicated = Others([other])
    engine, same_engine = Engine(tools_first=tools_first), Engine(tools_first=tools_first)
    for at, (system, tools) in enumerate(traffic):
        chain = prompt(system, tools)
        orders[at % 2].learn("m", W, chain, *engine.ask(chain))
        one.learn("m", W, chain, *same_engine.ask(chain))
    assert [order.scores() for order in orders] == [one.scores()] * 2


def test_a_process_that_starts_late_takes_the_heads_and_how_old_their_parts_are() -> None:
    order, newcomer, engine = TemplateOrder(), TemplateOrder(), Engine(tools_first=True)
    for system, computed in (("old", RECENT_TOKENS + 1), ("s", 0)):
        chain = prompt(system, f"abc{system}")
        order.learn("m", W, chain, *engine.ask(chain))
        order.computed(W, computed)
    for new in order.heads():
        newcomer.take(new)
    assert newcomer.heads() == order.heads()
    chain = prompt("t", "abcs")
    assert newcomer.learn("m", W, chain, *engine.ask(chain))
    assert not newcomer.learn("m", W, prompt("s", "abcs"), chain.size // 4, 1000), "which it knows"
    newcomer.learn("m", W, prompt("old", "xyz"), chain.size // 4, 1000)
    assert newcomer.scores() == [("m", 3)], "the text may be there still, or not"


@pytest.mark.parametrize("since", [0, RECENT_TOKENS + 1])
def test_what_may_have_been_evicted_or_not_is_no_evidence(since: int) -> None:
    """The text was seen long ago beside other tools and is still cached, which looks like the tools' tokens."""
    order, engine = TemplateOrder(), Engine(tools_first=False)
    for system, tools in (("s", "xyz"), ("t", "ab"), ("s", "ab")):
        chain = prompt(system, tools)
        order.learn("m", W, chain, *engine.ask(chain))
        if tools == "xyz":
            order.computed(W, since)
    assert order.scores() == []


def test_one_miss_decides_nothing() -> None:
    order = TemplateOrder()
    heads = [("s", f"{at}bc") for at in range(3)]  # with the text first, a second such head would find it cached
    assert not taught(Engine(tools_first=False, forgets=True), heads, order)


def test_what_is_remembered_is_bounded() -> None:
    order = TemplateOrder()
    for at in range(MODELS_LIMIT + 9):
        engine = Engine(tools_first=True)
        for system in ("s", "t"):
            chain = prompt(f"{at}{system}", "abcdef")
            order.learn(f"m{at}", WorkerId(f"w{at}"), chain, *engine.ask(chain))
    assert not order.known.of("m0").tools_first and order.known.of(f"m{MODELS_LIMIT + 8}").tools_first
    assert len(order.known.tools_first) == MODELS_LIMIT
    for at in range(HEADS_LIMIT + 9):
        order.learn("m", W, prompt(f"{at}", "abcdef"), 100, None)
    assert len(order) <= HEADS_LIMIT + PARTS_LIMIT + MODELS_LIMIT + MODELS_LIMIT + 10


def test_marks_say_where_the_head_ends() -> None:
    assert prompt("s", "abc").marks == Marks(4, 1)
    assert prompt("s", "abc", tools_first=True).marks == Marks(3, 4, tools_first=True)
