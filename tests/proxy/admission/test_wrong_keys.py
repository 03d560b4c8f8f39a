"""How long the answer to a wrong key waits, on a fake clock."""

from __future__ import annotations

from ppd.proxy.admission.wrong_keys import ADDRESSES, FORGET_S, FREE, LONGEST_S, WITHHELD_LIMIT, WrongKeys
from tests.support.clock import FakeClock


def delays(wrong_keys: WrongKeys, count: int, address: str = "a") -> list[float]:
    found = []
    for _ in range(count):
        found.append(wrong_keys.withhold(address))
        if found[-1]:
            wrong_keys.release()
    return found


def test_the_delay_grows_with_each_wrong_key_of_an_address_and_is_forgotten(clock: FakeClock) -> None:
    tested = WrongKeys(clock)
    assert delays(tested, FREE + 8) == [0.0] * FREE + [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_S, LONGEST_S]
    assert delays(tested, 1, "b") == [0.0]
    assert delays(tested, 5000)[-1] == LONGEST_S
    clock.advance(FORGET_S)
    assert delays(tested, 1) == [LONGEST_S]
    clock.advance(FORGET_S + 1)
    assert delays(tested, 1) == [0.0]


def test_what_is_kept_is_bounded(clock: FakeClock) -> None:
    tested = WrongKeys(clock)
    for number in range(2 * ADDRESSES):
        tested.withhold(str(number))
    assert len(tested) == ADDRESSES
    held = [delay for _ in range(FREE + WITHHELD_LIMIT + 10) if (delay := tested.withhold("a"))]
    assert len(held) == tested.withheld == WITHHELD_LIMIT
    tested.release()
    assert tested.withhold("b") == 0.0 and tested.withhold("a") == LONGEST_S
