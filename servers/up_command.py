"""`ppd up`: a fleet on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import click
from ppd.proxy.errors import PPDError
from ppd.proxy.workers import Role
from rich.console import Console
from rich.table import Table

from .fleet import Fleet, FleetSpec
from .vllm import TINY_ARGS, TINY_NAME

READY_S = {"sim": 60.0, "vllm": 600.0}
HAS_GPU = shutil.which("nvidia-smi") is not None


def run_until_stopped(console: Console, spec: FleetSpec) -> None:
    """Starts the fleet, shows it, and keeps it up until a signal."""

    async def run() -> None:
        async with Fleet(spec) as fleet:
            with console.status("starting the fleet"):
                await fleet.wait_ready(READY_S[spec.engine])
            show(console, fleet, spec)
            await until_signal(fleet)

    guarded(run())


def guarded(work: object) -> None:
    """Runs a coroutine; our errors and Ctrl-C end it in one line."""
    try:
        with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
            asyncio.run(work)  # type: ignore[arg-type]
    except PPDError as exc:
        raise click.ClickException(str(exc)) from exc


async def until_signal(fleet: Fleet) -> None:
    """Until Ctrl-C or SIGTERM; EngineFailed if a program of the fleet ends by itself."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    ended = asyncio.ensure_future(fleet.wait_ended())
    stopped = asyncio.ensure_future(stop.wait())
    try:
        done, _ = await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        ended.cancel()
        stopped.cancel()


def show(console: Console, fleet: Fleet, spec: FleetSpec) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("program", "address", "log"):
        table.add_column(column)
    for member in fleet.members:
        table.add_row(member.name, member.address, str(spec.log_dir / f"{member.name}.log"))
    console.print(table)
    console.print(f"OpenAI base URL: {fleet.url}/v1")


def make_spec(
    console: Console,
    engine: str,
    model: str,
    workers: dict[Role, int],
    engine_args: tuple[str, ...] = (),
    **rest: Any,
) -> FleetSpec:
    """The fleet's spec with what the engine needs prepared: for vLLM on CPU its environment and a tiny model."""
    python, device = "", "cpu"
    if engine == "vllm":
        device = "cuda" if HAS_GPU else "cpu"
        if device == "cuda":
            if not model:
                raise click.UsageError("--model is needed: the name or folder of the model to serve")
            python = sys.executable
        else:
            python, model, engine_args = _prepare_cpu(console, model, engine_args)
    return FleetSpec(
        engine=engine,
        workers=workers,
        model=model,
        device=device,
        python=python,
        engine_args=engine_args,
        **rest,
    )


def _prepare_cpu(console: Console, model: str, args: tuple[str, ...]) -> tuple[str, str, tuple[str, ...]]:
    from .tiny_model import ensure_model
    from .vllm_cpu import ensure

    environment = ensure(console.print)
    if model:
        return str(environment.python), model, args
    folder = ensure_model(environment)
    return str(environment.python), str(folder), ("--served-model-name", TINY_NAME, *TINY_ARGS, *args)


@click.command("up", context_settings={"ignore_unknown_options": False})
@click.option("--engine", type=click.Choice(["sim", "vllm"]), default="sim", show_default=True)
@click.option("-P", "--prefill", type=click.IntRange(0), default=1, show_default=True, help="prefill workers")
@click.option("-D", "--decode", type=click.IntRange(0), default=2, show_default=True, help="decode workers")
@click.option("-R", "--replica", type=click.IntRange(0), default=1, show_default=True, help="replicas")
@click.option("--model", default="", help="folder or name; default: a tiny model made here, on CPUs")
@click.option("--tensor-parallel", type=click.IntRange(1), default=1, show_default=True, help="GPUs a worker")
@click.option("--port", type=click.IntRange(1, 65535), default=10001, show_default=True, help="of the proxy")
@click.option("--heartbeat-port", type=click.IntRange(1, 65535), default=30001, show_default=True)
@click.option(
    "--port-offset", type=click.IntRange(0, 50000), default=0, show_default=True, help="added to worker ports"
)
@click.option("--admin-key", envvar="PPD_ADMIN_KEY", default="", help="or PPD_ADMIN_KEY")
@click.option("--config", "config_path", type=click.Path(exists=True, path_type=Path), help="the proxy's TOML file")
@click.option("--log-dir", type=click.Path(path_type=Path), default=Path("ppd-logs"), show_default=True)
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED)
def command(
    prefill: int, decode: int, replica: int, config_path: Path | None, engine: str, model: str, **rest: Any
) -> None:
    """Run workers by role and the proxy on this machine; ENGINE_ARGS after -- go to every engine."""
    console = Console()
    workers = {Role.PREFILL: prefill, Role.DECODE: decode, Role.REPLICA: replica}
    proxy_args = ("--config", str(config_path)) if config_path else ()
    spec = make_spec(console, engine, model, workers, proxy_args=proxy_args, **rest)
    run_until_stopped(console, spec)
