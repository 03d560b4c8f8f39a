from __future__ import annotations

import pytest

from ppd.offline.experiment.plan import plan
from ppd.offline.experiment.run import Profile, Run, Workload
from ppd.offline.load.script import scripts_of
from ppd.offline.load.target import Target
from ppd.offline.traces.turns import Blocks
from ppd.proxy.errors import ConfigError

FIRST = Profile(name="small", new_tokens=128, output_tokens=64)
LATER = Profile(name="tiny", new_tokens=16, output_tokens=32)


def run(**workload: float) -> Run:
    shape = Workload(first=FIRST, later=LATER, **workload)  # type: ignore[arg-type]
    return Run(topology="1P_1D", x=0.5, qps=5, seconds=4, warm_up_s=1, workload=shape)


def test_a_script_is_what_the_run_plans() -> None:
    planned, scripts = plan(run(turns=3, think_s=1.0)), scripts_of(run(turns=3, think_s=1.0), None, forced=True)
    assert [(one.number, one.arrival_s, one.measured) for one in scripts] == [
        (one.number, one.arrival_s, one.measured) for one in planned
    ]
    assert [one.routes for one in scripts] == [tuple(turn.route for turn in one.turns) for one in planned]
    assert {turn.new_tokens for one in scripts for turn in one.turns} == {128, 16}
    assert [turn.think_s for turn in scripts[0].turns] == [turn.think_s for turn in planned[0].turns]


def test_images_come_with_the_turns_that_have_them() -> None:
    planned, scripts = plan(run(image_every=3)), scripts_of(run(image_every=3), None, forced=False)
    images = [[turn.images for turn in one.turns] for one in scripts]
    assert images == [[turn.images for turn in one.turns] for one in planned]
    assert sum(map(sum, images)) > 0


def test_routes_are_left_to_the_endpoint_unless_forced() -> None:
    assert {one.route(1) for one in scripts_of(run(), None, forced=False)} == {""}
    assert {one.route(1) for one in scripts_of(run(), None, forced=True)} == {"LOCAL", "SPLIT"}


def test_a_shared_prefix_is_a_block_of_every_first_turn() -> None:
    scripts = scripts_of(run(shared_prefix_tokens=100), None, forced=False)
    assert {one.turns[0].blocks for one in scripts} == {Blocks((0,), 100)}
    assert {one.turns[1].blocks for one in scripts} == {None}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"url": "127.0.0.1:8000"}, "url: must start with http"),
        (
            {"url": "http://127.0.0.1:99999"},
            "url: must name a host, .* a port .* to 65535, got 'http://127.0.0.1:99999'",
        ),
        ({"url": "http://127.0.0.1:0"}, "a port from 1 to 65535"),
        ({"url": "http://127.0.0.1:abc"}, "a port from 1 to 65535"),
        ({"url": "http://[::1"}, "url: must name a host"),
        ({"url": "https://"}, "url: must name a host"),
        ({"forces_routes": True}, "admin_key: is needed"),
        ({"timeout_s": 0}, "timeout_s: must be positive"),
        ({"connections": 0}, "connections: must be at least 1"),
        ({"session_header": "X Session"}, "session_header: must be a header's name"),
    ],
)
def test_a_target_that_cannot_be_asked_is_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Target(**({"url": "http://h", "model": "m"} | fields))  # type: ignore[arg-type]


def test_a_target_shows_no_key() -> None:
    assert "sk-1" not in repr(Target(url="http://h", model="m", api_key="sk-1", admin_key="sk-1"))
