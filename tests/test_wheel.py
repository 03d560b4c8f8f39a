"""The wheel holds everything: built, installed elsewhere, and run from there."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.wheel


def run(*argv: str, cwd: Path) -> str:
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_installs_elsewhere_and_runs(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT), cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "elsewhere", with_pip=True)
    bin_folder = tmp_path / "elsewhere" / "bin"
    run(str(bin_folder / "pip"), "install", "--quiet", str(wheel), cwd=tmp_path)
    installed = run(str(bin_folder / "pip"), "list", cwd=tmp_path).lower()
    assert not any(heavy in installed for heavy in ("torch", "vllm", "numpy"))
    assert "serve" in run(str(bin_folder / "ppd"), "--help", cwd=tmp_path)
    for command in ("serve", "up", "agent", "sim", "demo", "table", "doctor"):
        assert "Usage" in run(str(bin_folder / "ppd"), command, "--help", cwd=tmp_path)
    packed = run(sys.executable, "-m", "zipfile", "-l", str(wheel), cwd=tmp_path)
    for needed in (
        "ppd/servers/vllm/lowcpu/ppd_lowcpu.py",
        "ppd/servers/cli/demo_conversation.json",
        "ppd/proxy/py.typed",
    ):
        assert needed in packed
    assert "2P_2D" in run(str(bin_folder / "ppd"), "table", "list", cwd=tmp_path)
    for program in (("ppd", "calibrate"), ("ppd", "bench"), ("ppd-build-table",)):
        refused = subprocess.run(
            [str(bin_folder / program[0]), *program[1:], "--help"], capture_output=True, text=True, check=False
        )
        assert refused.returncode == 1
        assert "pip install '.[offline]' in PPD's clone" in refused.stderr
    run(str(bin_folder / "pip"), "install", "--quiet", f"{wheel}[offline]", cwd=tmp_path)
    measure = (str(bin_folder / "ppd-build-table"), "--simulate", "--grid", "quick", "--only", "*/small_tiny/q1")
    run(*measure, "--hardware", "h200-llama-3.1-8b", "--out", "sweep", cwd=tmp_path)
    assert "index.html" in run(measure[0], "report", "sweep", cwd=tmp_path)
