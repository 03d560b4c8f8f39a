"""What engines need before a fleet can start: an interpreter with vLLM, a model, a device."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ppd.proxy.errors import ConfigError

from ..vllm.launch import TINY_ARGS, TINY_NAME, Device

HAS_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """`model`: a folder or name for the engine; `name`: the model that clients ask for."""

    model: str
    name: str
    device: Device = "cpu"
    python: str = ""
    gpu_count: int = 0
    engine_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)  # of the engine


def prepare(
    engine: str,
    model: str,
    engine_args: tuple[str, ...],
    progress: Callable[[str], None],
    *,
    connector: str | None = None,
    has_encoders: bool = False,
) -> Prepared:
    """With GPUs the installed vLLM, else vLLM for CPUs with a tiny model; ConfigError names what is missing.

    has_encoders: the model must take images, as the tiny one then does.
    """
    if engine == "sim":
        return Prepared(model=model, name=model or "sim", engine_args=engine_args)
    gpu_count = count_gpus()
    if gpu_count:
        if not model:
            raise ConfigError("model = '': must name the model to serve on GPUs", param="model")
        return Prepared(
            model=model,
            name=model,
            device="cuda",
            python=python_with_vllm(),
            gpu_count=gpu_count,
            engine_args=engine_args,
        )
    from ..vllm.cpu_install import ensure
    from ..vllm.encoder_parts import ensure_parts
    from ..vllm.mooncake_parts import ensure_mooncake, environment_of
    from ..vllm.tiny_llava import ensure_llava
    from ..vllm.tiny_model import ensure_model

    environment = ensure(progress)
    python = str(environment.python)
    env = environment_of(ensure_mooncake(environment, progress)) if connector == "mooncake" else {}
    if has_encoders:
        parts = str(ensure_parts(environment, progress))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), parts)))
    if model:
        return Prepared(model=model, name=model, python=python, engine_args=engine_args, env=env)
    tiny = ("--served-model-name", TINY_NAME, *TINY_ARGS)
    return Prepared(
        model=str(ensure_llava(environment) if has_encoders else ensure_model(environment)),
        name=TINY_NAME,
        python=python,
        engine_args=(*tiny, *engine_args),
        env=env,
    )


def count_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def python_with_vllm() -> str:
    """The first interpreter that can import vLLM: this one, that of the `vllm` script, or one on the PATH."""
    for python in _interpreters():
        if subprocess.run([python, "-c", HAS_VLLM], capture_output=True, check=False).returncode == 0:
            return python
    raise ConfigError("python: no interpreter here has vLLM; in PPD's clone, pip install '.[gpu]'", param="python")


def _interpreters() -> Iterator[str]:
    yield sys.executable
    script = shutil.which("vllm")
    if script is not None:
        with Path(script).open("rb") as file:
            first = file.readline(512)
        if first.startswith(b"#!") and b"python" in first:
            yield first[2:].decode("utf-8", "replace").split()[0]
    for name in ("python3", "python"):
        found = shutil.which(name)
        if found is not None:
            yield found
