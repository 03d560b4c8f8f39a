"""Which prompts are refused as queries of death, and for how long."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ppd.proxy.errors import PoisonedPrompt, comes_back
from ppd.proxy.health.poisoned_prompts import MEMORY_S, SAME_DEATH_S, SUSPECTS_KEPT, Life, PoisonedPrompts
from ppd.proxy.sessions.prefix_chain import PrefixEnd

POISON_S = 60.0
NOW_S = 1000.0
DEADLY = PrefixEnd(1)


def made(poison_s: float = POISON_S) -> PoisonedPrompts:
    return PoisonedPrompts(poison_s, lambda _: None)


def prompts(count: int) -> list[PrefixEnd]:
    return [PrefixEnd(100 + number) for number in range(count)]


def test_the_second_worker_is_the_last() -> None:
    book = made()
    assert not book.lost(DEADLY, "R1", NOW_S)
    assert book.refused_for_s(DEADLY, NOW_S) == 0.0
    assert book.lost(DEADLY, "R2", NOW_S + 5.0)
    assert book.refused_for_s(DEADLY, NOW_S + 5.0) == POISON_S
    assert book.refused_for_s(DEADLY, NOW_S + 5.0 + POISON_S) == 0.0
    assert book.refused_for_s(PrefixEnd(1, 2, 3), NOW_S + 5.0) == 0.0, "another prompt"


def test_copies_on_one_worker_are_one_loss() -> None:
    book = made()
    assert not any(book.lost(DEADLY, "R1", NOW_S + at_s) for at_s in (0.0, 0.1, 0.2, 30.0))


def test_two_lives_of_a_worker_are_two() -> None:
    book = made()
    book.lost(DEADLY, "R1 first", NOW_S)
    assert book.lost(DEADLY, "R1 second", NOW_S + 90.0)


def test_a_worker_that_answers_clears_a_prompt() -> None:
    book = made()
    book.lost(DEADLY, "R1", NOW_S)
    book.answered(DEADLY)
    assert not book.lost(DEADLY, "R2", NOW_S)
    assert book.refused_for_s(DEADLY, NOW_S) == 0.0


@pytest.mark.parametrize("aboard", [1, 5, 100])
def test_all_that_two_deaths_took_share_the_blame(aboard: int) -> None:
    """An operator who kills two workers with 100 turns aboard makes none of them wait for long."""
    book, taken = made(), prompts(aboard)
    for prompt in taken:
        book.lost(prompt, "R1", NOW_S)
    for prompt in (*taken, *prompts(500)[aboard:]):  # and others that had lost no worker before
        book.lost(prompt, "R2", NOW_S + 3.0)
    left_s = [book.refused_for_s(prompt, NOW_S + 3.0) for prompt in taken]
    assert left_s == [pytest.approx(POISON_S / aboard)] * aboard
    assert book.refused_for_s(prompts(500)[-1], NOW_S + 3.0) == 0.0


def test_one_that_kills_among_innocents_is_found_at_the_third_worker() -> None:
    book, innocents = made(), prompts(30)
    for prompt in (DEADLY, *innocents):
        book.lost(prompt, "R1", NOW_S)
    for prompt in (DEADLY, *innocents[:4]):  # the others had gone to other workers
        book.lost(prompt, "R2", NOW_S + 1.0)
    assert book.refused_for_s(DEADLY, NOW_S + 1.0) == pytest.approx(POISON_S / 5)
    for prompt in innocents:
        book.answered(prompt)
    for prompt in (DEADLY, *prompts(60)[30:]):
        book.lost(prompt, "R3", NOW_S + 20.0)
    assert book.refused_for_s(DEADLY, NOW_S + 20.0) == POISON_S


def test_deaths_of_one_worker_at_different_times_are_not_one() -> None:
    book, taken = made(), prompts(2)
    for number, prompt in enumerate(taken):
        book.lost(prompt, f"R{number}", NOW_S)
        book.lost(prompt, "bad", NOW_S + 2 * number * SAME_DEATH_S)
    assert book.refused_for_s(taken[1], NOW_S + 2 * SAME_DEATH_S) == POISON_S


def test_without_a_time_no_prompt_is_refused_but_no_third_worker_is_asked() -> None:
    book = made(0.0)
    book.lost(DEADLY, "R1", NOW_S)
    assert book.lost(DEADLY, "R2", NOW_S)
    assert book.refused_for_s(DEADLY, NOW_S) == 0.0


def test_suspects_are_forgotten_in_time_and_bounded() -> None:
    book = made()
    for prompt in prompts(SUSPECTS_KEPT + 10):
        book.lost(prompt, "R1", NOW_S)
    assert len(book.suspects) == SUSPECTS_KEPT
    assert not book.losses(prompts(1)[0]), "the oldest went"
    book.lost(DEADLY, "R1", NOW_S + 1.0)
    book.check(DEADLY, NOW_S + MEMORY_S)
    assert len(book.suspects) == 1
    book.check(DEADLY, NOW_S + MEMORY_S + 1.0)
    assert len(book.suspects) == 0


def test_a_refusal_says_when_to_come_back_and_that_no_library_is_to_repeat_it() -> None:
    refused = list[str]()
    book = PoisonedPrompts(POISON_S, refused.append)
    for life in ("R1", "R2"):
        book.lost(DEADLY, life, NOW_S)
    with pytest.raises(PoisonedPrompt) as refusal:
        book.check(DEADLY, NOW_S + 17.5)
    assert comes_back(refusal.value) == {
        "X-PPD-Refused": "poisoned_prompt",
        "Retry-After": "43",
        "x-should-retry": "false",
    }
    assert refused == ["poisoned_prompt"]


class Copies:
    """What a book sends, applied to another as often and as late as may be."""

    def __init__(self, target: PoisonedPrompts, times: int = 1) -> None:
        self._target, self._times = target, times

    def catch_up(self) -> None: ...

    def changed(self, prompt: PrefixEnd, losses: Mapping[Life, float]) -> None:
        for _ in range(self._times):
            self._target.adopt(prompt, dict(losses))


@pytest.mark.parametrize("times", [1, 3])
def test_every_process_knows_a_suspect(times: int) -> None:
    one, other = made(), made()
    one.replicated, other.replicated = Copies(other, times), Copies(one, times)
    for prompt in (DEADLY, *prompts(3)):
        one.lost(prompt, "R1", NOW_S)
        assert other.lost(prompt, "R2", NOW_S + 1.0)
    for book in (one, other):
        assert book.refused_for_s(DEADLY, NOW_S + 1.0) == pytest.approx(POISON_S / 4)
    newcomer = made()
    for prompt, losses in one.all_losses():
        newcomer.adopt(prompt, losses)
    assert newcomer.refused_for_s(DEADLY, NOW_S + 1.0) == pytest.approx(POISON_S / 4)
    other.answered(DEADLY)
    assert one.refused_for_s(DEADLY, NOW_S + 1.0) == 0.0
