"""What is packed holds everything: the wheel, built from the packed sources, is installed elsewhere and runs there."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from ppd.servers.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.wheel
# Of what is built and installed here little is run, and once.
FAST = {"CFLAGS": "-O0"}
INSTALL = ("install", "--quiet", "--no-compile")
HELP_OF_ALL = """
from ppd.servers.cli.main import COMMANDS, main
for name in COMMANDS:
    main([name, "--help"], standalone_mode=False)
"""


def run(*argv: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(argv, cwd=cwd, env=os.environ | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_installs_elsewhere_and_runs(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT), cwd=tmp_path, **FAST)
    (wheel,), (sources,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    venv.create(tmp_path / "elsewhere", with_pip=True)
    bin_folder = tmp_path / "elsewhere" / "bin"
    run(str(bin_folder / "pip"), *INSTALL, str(wheel), cwd=tmp_path)
    installed = run(str(bin_folder / "pip"), "list", cwd=tmp_path).lower()
    assert not any(heavy in installed for heavy in ("torch", "vllm", "numpy"))
    assert "serve" in run(str(bin_folder / "ppd"), "--help", cwd=tmp_path)
    assert run(str(bin_folder / "python"), "-c", HELP_OF_ALL, cwd=tmp_path).count("Usage") == len(COMMANDS)
    packed = run(sys.executable, "-m", "zipfile", "-l", str(wheel), cwd=tmp_path)
    for needed in (
        "ppd/servers/vllm/lowcpu/ppd_lowcpu.py",
        "ppd/servers/ec_redis/pyproject.toml",
        "ppd/servers/cli/demo_conversation.json",
        "ppd/proxy/py.typed",
        "ppd/proxy/plane/poller.pyi",
    ):
        assert needed in packed
    assert not any(f".{suffix} " in packed for suffix in ("c", "h", "pyx", "pxd")), "compiled already"
    assert is_built(str(bin_folder / "python"), tmp_path) == "True"
    assert "2P_2D" in run(str(bin_folder / "ppd"), "table", "list", cwd=tmp_path)
    for program in (("ppd", "calibrate"), ("ppd", "bench"), ("ppd-build-table",)):
        refused = subprocess.run(
            [str(bin_folder / program[0]), *program[1:], "--help"], capture_output=True, text=True, check=False
        )
        assert refused.returncode == 1
        assert "pip install '.[offline]' in PPD's clone" in refused.stderr
    run(str(bin_folder / "pip"), *INSTALL, f"{wheel}[offline]", cwd=tmp_path)
    measure = (str(bin_folder / "ppd-build-table"), "--simulate", "--grid", "quick", "--only", "*/small_tiny/q1")
    run(*measure, "--hardware", "h200-llama-3.1-8b", "--out", "sweep", cwd=tmp_path)
    assert "index.html" in run(measure[0], "report", "sweep", cwd=tmp_path)
    without_a_compiler(bin_folder, sources, tmp_path)


def is_built(python: str, folder: Path, **env: str) -> str:
    said = "import ppd.proxy.assembly, ppd.proxy.plane as plane; print(plane.IS_BUILT)"
    return run(python, "-c", said, cwd=folder, **env).strip()


def without_a_compiler(bin_folder: Path, sources: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "tarfile", "-e", str(sources), "unpacked", cwd=tmp_path)
    (unpacked,) = (tmp_path / "unpacked").iterdir()  # of an archive pip keeps what it built from one of that name
    install = (*INSTALL, "--no-deps", "--target", "uncompiled", str(unpacked))
    run(str(bin_folder / "pip"), *install, cwd=tmp_path, CC="/bin/false")
    instead = {"PYTHONPATH": str(tmp_path / "uncompiled")}
    assert is_built(str(bin_folder / "python"), tmp_path, **instead) == "False"
    (tmp_path / "native.toml").write_text('port = 0\nheartbeat_port = 0\ndata_plane = "native"\n')
    told = run(str(bin_folder / "ppd"), "doctor", "--config", "native.toml", cwd=tmp_path, **instead)
    assert "native is not built here, so direct serves" in told
