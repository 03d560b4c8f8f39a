"""Configurations of the published rows: topology, x and mode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ppd.offline.experiment.cells import MeasuredCell
from ppd.offline.tables.published_cells import config_of, read_cells
from ppd.proxy.errors import FormatError

HEADER = (
    "config,workload,qps,n_t1,n_t2,t1_ttft_avg,t1_ttft_p50,t1_ttft_p99,t2_ttft_avg,t2_ttft_p50,t2_ttft_p99,"
    "t1_tpot_avg,t2_tpot_avg,t2_tpot_p99,tok_s,req_s,success_pct,duration_s\n"
)
FIGURES = "small_tiny,4,40,40,100,100,120,130,130,150,8,8,8,1,1,100,10"


def read(folder: Path, *configs: str) -> list[MeasuredCell]:
    path = folder / "rows.csv"
    path.write_text(HEADER + "".join(f"{config},{FIGURES}\n" for config in configs))
    return read_cells(path)


@pytest.mark.parametrize(
    ("config", "topology", "x", "mode"),
    [
        ("4R", "4R", None, "replica"),
        ("1P_3D", "1P_3D", 0.0, "x=0"),
        ("1P_3pD", "1P_3D", 1.0, "x=1"),
        ("1P_1D_2pD", "1P_1D_2pD", None, "0<x<1"),
        ("2P_1D_1pD", "2P_1D_1pD", None, "0<x<1"),
        ("1R_1P_2D", "1R_1P_2D", 0.0, "hybrid"),
        ("1R_2P_1pD", "1R_2P_1D", 1.0, "hybrid"),
        ("1R_1P_1D_1pD", "1R_1P_1D_1pD", None, "hybrid"),
    ],
)
def test_a_configuration_is_its_topology_and_x(
    tmp_path: Path, config: str, topology: str, x: float | None, mode: str
) -> None:
    (cell,) = read(tmp_path, config)
    assert (cell.topology, cell.x, cell.mode) == (topology, x, mode)
    assert config_of(cell) == config


def test_a_fleet_whose_every_d_keeps_its_turns_is_x_1(tmp_path: Path) -> None:
    (cell,) = read(tmp_path, "4R")
    assert replace(cell, topology="1P_3pD").mode == "x=1"


def test_a_configuration_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="line 2: config: topology = '1P_2X'"):
        read(tmp_path, "1P_2X")
