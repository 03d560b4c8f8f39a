"""What the doctor says of the data plane, in a config and of a running proxy, and what that one tells of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppd.proxy.assembly import make_poller
from ppd.proxy.cli.doctor.checks import data_plane_is_built
from ppd.proxy.cli.doctor.gather import Said, data_planes
from ppd.proxy.cli.doctor.values import ConfigFact, DataPlaneFact, Facts, Level, ProxyFact
from ppd.proxy.config import DataPlane, ProxyConfig
from ppd.proxy.plane import IS_BUILT
from ppd.proxy.telemetry.merged_metrics import Family, added, families, render
from ppd.proxy.telemetry.metrics import Metrics, data_plane_info

FELL_BACK = DataPlaneFact("direct", "native", is_built=False)
NATIVE = DataPlaneFact("native", "native", is_built=True)
PROXY = ProxyFact(address="proxy:1")


@pytest.mark.parametrize(
    ("fact", "level", "here", "there"),
    [
        (NATIVE, Level.OK, *["native serves; the compiled modules are built"] * 2),
        (replace(FELL_BACK, configured="direct"), Level.OK, *["direct serves; the compiled modules are not built"] * 2),
        (FELL_BACK, Level.WARN, "native is not built here, so direct serves", "native is not built there, so direct"),
    ],
)
def test_the_doctor_says_which_plane_serves(fact: DataPlaneFact, level: Level, here: str, there: str) -> None:
    (of_config,) = data_plane_is_built(Facts(config=ConfigFact(data_plane=fact)))
    (of_proxy,) = data_plane_is_built(Facts(proxy=replace(PROXY, data_planes=(fact,))))
    assert of_config.level is of_proxy.level is level
    assert of_config.message.startswith(here)
    assert of_proxy.message.startswith(there)
    assert bool(of_config.remedy) is (level is Level.WARN)


def scraped(*processes: tuple[DataPlane, bool]) -> bytes:
    """The `/metrics` of a proxy by what was configured for each of its processes, and whether it is built there."""
    return render(added(counted(*process) for process in processes))


def counted(configured: DataPlane, is_built: bool) -> list[Family]:
    metrics = Metrics()
    metrics.watch(lambda: [data_plane_info(configured, is_built)])
    return families(metrics.registry)


def test_the_doctor_reads_what_each_process_serves_by() -> None:
    one_way = scraped((DataPlane.NATIVE, False), (DataPlane.NATIVE, False))
    assert b'ppd_data_plane_info{built="no",configured="native",plane="direct"} 1.0' in one_way
    assert list(data_planes(Said(200, one_way))) == [FELL_BACK]
    replaced_meanwhile = scraped((DataPlane.ASGI, True), (DataPlane.NATIVE, True))
    assert list(data_planes(Said(200, replaced_meanwhile))) == [DataPlaneFact("asgi", "asgi"), NATIVE]


@pytest.mark.parametrize(
    "said",
    [
        Said(401, b'ppd_data_plane_info{plane="x",configured="x",built="no"} 1'),
        Said(200, b"ppd_data_plane_info{plane"),
        Said(200, b'ppd_data_plane_info{plane="direct"} 1'),
        Said(200, b"\xff"),
        Said(0),
    ],
)
def test_what_cannot_be_read_tells_nothing(said: Said) -> None:
    assert list(data_planes(said)) == []


@pytest.mark.parametrize(
    ("plane", "is_built", "tells", "logged"),
    [
        (DataPlane.NATIVE, False, True, ["data_plane = native is not built here, so direct serves"]),
        (DataPlane.NATIVE, False, False, []),
        (DataPlane.DIRECT, False, True, []),
        (DataPlane.ASGI, True, True, []),
    ],
)
def test_one_process_says_once_that_another_plane_serves(
    plane: DataPlane, is_built: bool, tells: bool, logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert make_poller(ProxyConfig(data_plane=plane), tells, is_built) is None
    assert [message.partition(";")[0] for message in caplog.messages] == logged


@pytest.mark.skipif(not IS_BUILT, reason="the compiled modules are not built here")
def test_what_is_built_serves(caplog: pytest.LogCaptureFixture) -> None:
    assert make_poller(ProxyConfig(data_plane=DataPlane.NATIVE), tells=True) is not None
    assert caplog.messages == []
