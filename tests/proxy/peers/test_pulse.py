"""Who hangs, by looks at a counter: only a process that stands still while the supervisor does not."""

from __future__ import annotations

import pytest

from ppd.proxy.peers.pulse import LOOK_S, SILENT_LOOKS, START_LOOKS, PulseWatch

NEVER = None
BEATS, STILL, LATE = "b", ".", "l"  # one look: after a beat, without one, without one and late itself


def killed_at(looks: str) -> int | None:
    """The number of the look that finds it hanging."""
    watch, beats = PulseWatch(7), 7  # its predecessor's
    for number, look in enumerate(looks, 1):
        beats += look == BEATS
        if watch.hangs(beats, 60.0 if look == LATE else LOOK_S):
            return number
    return NEVER


FULL, ALMOST = STILL * SILENT_LOOKS, STILL * (SILENT_LOOKS - 1)


@pytest.mark.parametrize(
    ("looks", "killed"),
    [
        (BEATS * 100, NEVER),
        (BEATS + FULL, 1 + SILENT_LOOKS),
        ((BEATS + ALMOST) * 10, NEVER),
        (BEATS + ALMOST + LATE + ALMOST + BEATS, NEVER),  # all stood still together: ctrl-z, a laptop's lid
        (BEATS + ALMOST + LATE + FULL, 1 + 2 * SILENT_LOOKS),
        (BEATS + LATE * 100, NEVER),  # the machine starves
        (STILL * START_LOOKS, START_LOOKS),  # it never began
        (STILL * (START_LOOKS - 1) + BEATS, NEVER),
    ],
)
def test_who_is_silent_while_the_supervisor_looks_in_time_hangs(looks: str, killed: int | None) -> None:
    assert killed_at(looks) == killed


def test_a_standstill_is_noticed_within_five_seconds() -> None:
    assert LOOK_S * (1 + SILENT_LOOKS) <= 4.5
