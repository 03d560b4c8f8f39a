"""The maps of the modes show what the rules say: which panel is which, and where one route ends."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from matplotlib.figure import Figure

from benchmarks.pages import scenes
from benchmarks.pages.__main__ import FIGURES, LAWS, page_path
from benchmarks.pages.maps import PANELS, destinations
from benchmarks.pages.pictures import png
from benchmarks.pages.scenes import Destination
from ppd.offline.goodput.modes import NAMES

L, S = Destination.LOCAL, Destination.SPLIT
L_ELSEWHERE, S_ELSEWHERE = Destination.LOCAL_ELSEWHERE, Destination.SPLIT_ELSEWHERE


def drawn(name: str, held: Sequence[int], new: Sequence[int]) -> list[list[list[Destination]]]:
    """Of each panel, by new tokens."""
    return [
        [[Destination(value) for value in row] for row in destinations(panel, held, new).tolist()]
        for panel in PANELS[name]()
    ]


def test_every_mode_has_a_figure() -> None:
    assert {*NAMES, LAWS} == FIGURES.keys()


def test_all_turns_are_split_in_always_split() -> None:
    assert drawn("always_split", (0, 1000, 100_000), (64, 16_384)) == [[[S, S, S]] * 2] * 3


def test_all_but_first_turns_are_local_in_always_local() -> None:
    assert drawn("always_local", (0, 1000, 100_000), (64, 16_384)) == [[[S, L, L]] * 2] * 3


def test_prefix_threshold_changes_at_its_limit() -> None:
    assert drawn("prefix_threshold", (0, 5000), (2048, 2049)) == [[[L, L], [S, S]]] * 3


def test_isl_bounding_changes_below_its_limits_and_where_d_is_busy() -> None:
    by_length = drawn("isl_bounding", (0, 5000), (2047, 2048))
    assert by_length == [[[S, L], [S, S]], [[S, S], [S, S]], [[S, L], [S, S]]]
    by_share = drawn("isl_bounding", (500,), (1166, 1167))
    assert by_share == [[[L], [S]], [[S], [S]], [[L], [S]]], "0.7 of 1,666 is a little more than 1,166"


@pytest.mark.parametrize(
    ("name", "idle", "busy_d", "busy_p"),
    [("prefill_load", S, S, L), ("isl_or_load", S, S, L), ("conditional", S, S, L), ("isl_bounding", S, S, S)],
)
def test_long_turns_leave_a_busy_p(name: str, idle: Destination, busy_d: Destination, busy_p: Destination) -> None:
    assert drawn(name, (5000,), (4096,)) == [[[idle]], [[busy_d]], [[busy_p]]]


def test_slo_leaves_d_where_streams_or_prompts_are_there() -> None:
    idle, busy_d, busy_both, busy_own_d = drawn("slo", (1500, 30_000), (64, 16_384))
    assert idle == [[L, L], [L, L]]
    assert busy_d == [[L, L], [S, S]]
    assert busy_both == [[L, L], [S, S]]
    assert busy_own_d == [[L_ELSEWHERE, S_ELSEWHERE]] * 2


def test_an_oracle_computes_more_beside_streams_if_the_answer_is_long() -> None:
    assert drawn("oracle", (5000,), (2000,)) == [[[S]], [[L]], [[L]]]
    assert drawn("oracle", (5000,), (8000,)) == [[[S]], [[S]], [[L]]]


@pytest.mark.parametrize("name", PANELS)
def test_the_page_names_the_reasons(name: str) -> None:
    named = set(re.findall(r"`(\w+)`", page_path(name).read_text() + page_path("slo").read_text() * (name == "oracle")))
    for panel in PANELS[name]():
        fleet = scenes.fleet_in(panel.scene)
        for held in (0, 500, 5000, 60_000):
            for new in (64, 1000, 4096, 16_384):
                turn = scenes.turn_in(panel.scene, held, new)
                assert scenes.decided(turn, fleet, panel.rules, panel.scene).reason in named


def test_a_figure_is_the_same_each_time() -> None:
    def drawn_once() -> bytes:
        figure = Figure(figsize=(1, 1))
        figure.subplots().plot([1, 2])
        return png(figure)

    assert drawn_once() == drawn_once()
