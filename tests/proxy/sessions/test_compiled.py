"""The room's modules as C and as Python from the same files: they tell the same kinds, and learn the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd.proxy import plane
from ppd.proxy.sessions import message_units, text_kinds, token_estimates
from ppd.proxy.sessions.prefix_chain import Chain, Marks
from ppd.proxy.sessions.text_kinds import Kind
from tests.proxy.uncompiled import is_compiled, uncompiled_sessions
from tests.support.requests import HASHER

UNCOMPILED = uncompiled_sessions()

pytestmark = pytest.mark.skipif(
    not is_compiled(text_kinds, token_estimates, message_units), reason="the compiled modules are not built"
)

TEXT = st.one_of(st.text(), st.text(' aeinst{}0:",', min_size=500), st.binary(), st.none(), st.sampled_from([*Kind]))
SIZES = st.lists(st.integers(0, 1 << 40), min_size=1, max_size=20).map(lambda sizes: [0, *sorted(sizes)])
NUMBERS = st.one_of(st.integers(-5, 5000), st.sampled_from([1 << 40, 1 << 70, -(1 << 70), 10**400]))
TURN = st.tuples(
    st.sampled_from(["a", "b", "c", "d"]),
    st.dictionaries(st.sampled_from([*Kind]).map(int), st.integers(1, 1 << 40), max_size=6),
    NUMBERS,
    st.one_of(st.none(), NUMBERS),
)


@given(
    SIZES, st.lists(TEXT, max_size=21), st.booleans(), st.integers(0, 4), st.one_of(st.none(), st.integers(0, 1 << 40))
)
def test_what_a_prompt_adds_is_the_same(
    ends: list[int], texts: list[Any], is_text: bool, tools: int, covered: int | None
) -> None:
    tools, data = min(tools, len(ends) - 1), b"abc {" * 200 if len(texts) == 20 else b""
    texts = texts[: len(ends)]
    chain = Chain(range(len(ends)), ends, HASHER, data=data, is_text=is_text, marks=Marks(tools), texts=tuple(texts))
    found = text_kinds.added(chain, covered)
    assert found == UNCOMPILED["text_kinds"].added(chain, covered)
    assert all(type(number) is int for number in found), "as other processes are told"


@given(TEXT)
def test_each_text_is_of_the_same_kind(text: Any) -> None:
    assert text_kinds.kind_of(text) == UNCOMPILED["text_kinds"].kind_of(text)
    if not isinstance(text, int):
        assert text_kinds.sample(text) == UNCOMPILED["text_kinds"].sample(text)


@given(st.lists(TURN, max_size=60))
def test_the_same_is_learnt(turns: list[tuple[str, dict[int, int], int, int | None]]) -> None:
    ours, plain = token_estimates.TokenEstimator(capacity=3), UNCOMPILED["token_estimates"].TokenEstimator(capacity=3)
    for model, added, tokens, completion in turns:
        amounts = tuple(number for pair in added.items() for number in pair)
        for one in (ours, plain):
            one.learn(model, amounts, tokens, completion)
        assert ours.estimate(model, amounts) == pytest.approx(plain.estimate(model, amounts), rel=1e-9, abs=1)
        for asked in ((model, None, None), (model, 12.5, completion), ("e", None, tokens)):
            assert ours.expected_output(*asked) == pytest.approx(plain.expected_output(*asked), rel=1e-9, abs=1)
    for own, theirs in zip(ours.estimates(), plain.estimates(), strict=True):
        assert own.model == theirs.model
        for name in ("means", "variances", "output_tokens"):
            known, as_python = getattr(own, name), getattr(theirs, name)
            assert known == (None if as_python is None else pytest.approx(as_python, rel=1e-9))
        newcomer = token_estimates.TokenEstimator()
        newcomer.adopt(own)
        assert list(newcomer.estimates()) == [own]


@pytest.mark.parametrize("added", [(16, 5), (-17, 5), (0,), (0, "1"), [0, 1]])
def test_what_are_no_amounts_is_an_error_and_nothing_else(added: Any) -> None:
    with pytest.raises((IndexError, TypeError)):
        token_estimates.TokenEstimator().estimate("m", added)


IDS = st.sampled_from(["", "c1", "c2", "c3", "\ud800"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("text"), st.sampled_from(["", "a", "\ud800", "x" * 5000])),
        st.tuples(st.just("part"), st.integers(0, (1 << 60) - 1)),
        st.tuples(st.just("call"), IDS),
        st.tuples(st.just("result"), IDS),
        st.tuples(st.just("show"), st.sampled_from(["longer than a", None])),
    ),
    max_size=6,
)


class Cuts:
    def __init__(self) -> None:
        self.told: list[tuple[str, bytes, int]] = []

    def note(self, state: Any, text: bytes, offset: int) -> None:
        self.told.append((state.hexdigest(), text, offset))


def played(module: Any, messages: list[tuple[str, list[tuple[str, Any]]]], prints_ids: bool) -> list[Any]:
    """Each message's unit, made and joined to what comes before, and the same packed."""
    places, found, previous, cuts = module.CallPlaces(as_they_are=prints_ids), [], 7, Cuts()
    of_packed = module.CallPlaces(as_they_are=prints_ids)
    for answers, steps in messages:
        unit = module.MessageUnit(HASHER, "tool", "n", answers)
        for kind, value in steps:
            unit.begin_text()
            if kind == "text":
                unit.add_text(value)
                unit.show(value)
            elif kind == "part":
                unit.add_part(b"M", value, 4)
            elif kind == "call":
                unit.add_call(value, 5, 9, places)
            elif kind == "result":
                result = module.MessageUnit(HASHER, "tool", "", value, is_part=True)
                result.add_text("x" * 5000)
                unit.add_result(result, places)
            else:
                unit.show(value)
        places.begin_round()
        of_packed.begin_round()
        before, previous = previous, unit.key_after(previous, places, HASHER.unit, cuts)
        packed = unit.packed(weighs=9)
        if packed is not None and plane.IS_FAST:
            assert HASHER.known_unit(before, packed, of_packed) == previous
        else:
            unit.key_after(before, of_packed, HASHER.unit)
        assert places.result(answers) == of_packed.result(answers)
        found += [unit.text, unit.size, unit.is_cut, previous, packed]
    return [*found, cuts.told]


@given(st.lists(st.tuples(IDS, STEPS), max_size=5), st.booleans())
def test_units_of_messages_are_the_same(messages: list[tuple[str, list[tuple[str, Any]]]], prints_ids: bool) -> None:
    expected = played(UNCOMPILED["message_units"], messages, prints_ids)
    assert played(message_units, messages, prints_ids) == expected
