"""Measures engine steps and writes their times. Imports only PyTorch and the standard library:

    python -m benchmarks.interference.engine_step.measure --output steps.jsonl.gz

Each point (`network.StepPoint`) is one shape of step: it is warmed up, then timed `--step-repeats` times, and each time
is kept. On CUDA a step is captured into a graph once and replayed, as vLLM does for small steps, because launching the
kernels of 32 layers one by one takes longer than a small step computes; `--no-graphs` launches them. Times on CUDA are
taken by CUDA events. Points that do not fit into memory are recorded with the reason.

The file is gzipped JSON lines: a head, then one object a point and, with two GPUs, one for each kind of copy.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from .network import Attention, Network, NetworkShape, StepPoint

VERSION = 1
KIND = "ppd-engine-steps"
_WORKSPACE_BYTES = 6e9  # of a GPU, for activations and graphs
_COPY_BYTES = (1 << 20, 1 << 24, 1 << 28)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m benchmarks.interference.engine_step.measure",
        description="Measure engine steps of a network with a model's shapes.",
    )
    top.add_argument("--output", type=Path, required=True)
    add_arguments(top)
    return top


def add_arguments(top: Any) -> None:
    for field in fields(NetworkShape):
        top.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default, metavar="N")
    top.add_argument("--name", default="Llama-3.1-8B", help="what the shapes are called")
    top.add_argument("--device", default="", help="cuda where there is one, else cpu")
    top.add_argument("--dtype", default="bfloat16")
    top.add_argument("--decode-batches", type=int, nargs="*", default=(1, 2, 4, 8, 16, 32, 64, 128, 256), metavar="N")
    top.add_argument("--decode-contexts", type=int, nargs="+", default=(512, 2048, 8192, 32768), metavar="N")
    top.add_argument(
        "--chunks", type=int, nargs="*", default=(16, 64, 128, 256, 512, 1024, 2048, 4096, 8192), metavar="N"
    )
    top.add_argument("--chunk-contexts", type=int, nargs="+", default=(0, 2048, 8192, 32768), metavar="N")
    top.add_argument("--mixed-batches", type=int, nargs="*", default=(16, 64, 128), metavar="N")
    top.add_argument("--kv-tokens", type=int, default=0, metavar="N", help="tokens of KV; 0: what fits into memory")
    top.add_argument("--warm-ups", type=int, default=3, metavar="N")
    top.add_argument("--step-repeats", type=int, default=20, metavar="N")
    top.add_argument("--threads", type=int, default=0, metavar="N", help="of a CPU; 0: PyTorch's own choice")
    top.add_argument("--attention", choices=list(Attention), type=Attention, default=Attention.CUDNN, help="on CUDA")
    top.add_argument("--compile", action="store_true", help="fuse what lies between matrix products and attention")
    top.add_argument("--no-graphs", action="store_true", help="launch kernels one by one on CUDA")


def argv_of(args: argparse.Namespace) -> list[str]:
    """This program's own arguments out of a larger namespace, without `output`."""
    argv = []
    for name in vars(parser().parse_args(["--output", "."])).keys() - {"output"}:
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            argv += [flag] if value else []
        elif isinstance(value, (list, tuple)):
            argv += [flag, *map(str, value)]
        elif value != "":
            argv += [flag, str(value)]
    return argv


def points(args: argparse.Namespace) -> Iterator[StepPoint]:
    """Decode alone, a chunk alone, and both in one step (at the second decode context, with every other chunk size)."""
    for batch in args.decode_batches:
        for context in args.decode_contexts:
            yield StepPoint(batch, context, 0, 0)
    for chunk in args.chunks:
        for cached in args.chunk_contexts:
            yield StepPoint(0, 0, chunk, cached)
    context = args.decode_contexts[min(1, len(args.decode_contexts) - 1)]
    for batch in args.mixed_batches:
        for chunk in args.chunks[::2]:
            for cached in args.chunk_contexts[:2]:
                yield StepPoint(batch, context, chunk, cached)


class Stopwatch:
    """Times a call on its device, in seconds."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self._is_cuda = device.startswith("cuda")

    def settle(self) -> None:
        if self._is_cuda:
            self._torch.cuda.synchronize()

    def times(self, call: Callable[[], object], repeats: int) -> list[float]:
        return [self._time(call) for _ in range(repeats)]

    def _time(self, call: Callable[[], object]) -> float:
        if not self._is_cuda:
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        self._torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1000


def time_point(network: Network, point: StepPoint, args: argparse.Namespace, watch: Stopwatch) -> list[float]:
    torch = network.torch
    tokens, rotations = network.inputs(point), network.rotations(point)

    def step() -> object:
        return network.step(point, tokens, rotations)

    for _ in range(max(1, args.warm_ups)):
        step()
    watch.settle()
    if not network.device.startswith("cuda") or args.no_graphs:
        return watch.times(step, args.step_repeats)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    watch.settle()
    return watch.times(graph.replay, args.step_repeats)


def measured(network: Network, args: argparse.Namespace, kv_tokens: int) -> Iterator[dict[str, Any]]:
    watch, torch = Stopwatch(network.torch, network.device), network.torch
    every = list(points(args))
    for index, point in enumerate(every):
        row: dict[str, Any] = asdict(point)
        if point.kv_tokens > kv_tokens:
            row["skipped"] = f"{point.kv_tokens} tokens of KV do not fit into {kv_tokens}"
        else:
            try:
                with torch.inference_mode():
                    row["seconds"] = time_point(network, point, args, watch)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                row["skipped"] = "out of memory"
        median = sorted(row["seconds"])[len(row["seconds"]) // 2] * 1000 if "seconds" in row else None
        said = row.get("skipped") or f"{median:.3f} ms"
        print(f"{index + 1}/{len(every)} {point}: {said}", file=sys.stderr, flush=True)
        yield row


def copies(torch: Any, watch: Stopwatch, repeats: int) -> Iterator[dict[str, Any]]:
    """Host to GPU and GPU to GPU, over which KV is transferred; nothing with fewer than two GPUs."""
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        return
    for size in _COPY_BYTES:
        there = torch.empty(size, dtype=torch.uint8, device="cuda:1")
        for name, here in (
            ("host-to-gpu", torch.empty(size, dtype=torch.uint8).pin_memory()),
            ("gpu-to-gpu", torch.empty(size, dtype=torch.uint8, device="cuda:0")),
        ):
            there.copy_(here)
            torch.cuda.synchronize(1)
            seconds = []
            for _ in range(repeats):
                started = time.perf_counter()
                there.copy_(here, non_blocking=True)
                torch.cuda.synchronize(0)
                torch.cuda.synchronize(1)
                seconds.append(time.perf_counter() - started)
            yield {"copy": name, "bytes": size, "seconds": seconds}


def memory(torch: Any, shape: NetworkShape, device: str, value_bytes: int) -> tuple[float, int]:
    """The device's bytes, and the tokens of KV that fit beside the weights; 0, 0 on a CPU."""
    if not device.startswith("cuda"):
        return 0.0, 0
    total = float(torch.cuda.mem_get_info()[1])
    free = 0.9 * total - shape.weights * value_bytes - _WORKSPACE_BYTES
    return total, int(free / (shape.kv_values_per_token * value_bytes))


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise SystemExit(f"error: PyTorch is not installed for {sys.executable}: pip install torch") from None
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.threads:
        torch.set_num_threads(args.threads)
    shape = NetworkShape(**{field.name: getattr(args, field.name) for field in fields(NetworkShape)})
    value_bytes = torch.empty(0, dtype=getattr(torch, args.dtype)).element_size()
    total_bytes, capacity = memory(torch, shape, device, value_bytes)
    kv_tokens = args.kv_tokens or capacity or max(point.kv_tokens for point in points(args))
    if kv_tokens < 1:
        raise SystemExit(f"error: {shape.weights * value_bytes / 1e9:.0f} GB of weights do not fit on {device}")
    head = {
        "version": VERSION,
        "kind": KIND,
        "name": args.name,
        "shape": asdict(shape),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU {platform.machine()}",
        "threads": 0 if device.startswith("cuda") else torch.get_num_threads(),
        "memory_bytes": total_bytes,
        "dtype": args.dtype,
        "value_bytes": value_bytes,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "graphs": device.startswith("cuda") and not args.no_graphs,
        "attention": args.attention,
        "compiled": args.compile,
        "kv_tokens": kv_tokens,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
    }
    network = Network(
        shape,
        kv_tokens=kv_tokens,
        device=device,
        dtype=args.dtype,
        attention=args.attention,
        compiled=args.compile,
    )
    rows = [*measured(network, args, kv_tokens), *copies(torch, Stopwatch(torch, device), args.step_repeats)]
    write(args.output, [head, *rows])


def write(path: Path, rows: Sequence[object]) -> None:
    """Atomically. `ppd` need not be installed here, so its own function is not used."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0))
        beside.replace(path)
    except OSError as exc:
        beside.unlink(missing_ok=True)
        raise SystemExit(f"error: {path}: cannot be written: {exc.strerror}") from exc


if __name__ == "__main__":
    main()
