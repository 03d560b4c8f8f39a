"""What `ppd replay` takes for a receipt log: seconds, receipts a second, and the most memory it had.

    python -m benchmarks.turns.replay_cost

writes a log of a million receipts to a temporary folder, and replays it by the program in a process of its own. The
sessions have four turns in the mean, and pause for 30 s in the median, so on 1P_3D three times as many are awaited as
the D have room for. `--log FILE` keeps the log.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import click
import msgspec

from ppd.proxy.failures import Leg
from ppd.proxy.telemetry.receipts import CandidatesRecord, LegRecord, Receipt

FLAGS = ("--mode", "slo", "--profile", "h100-llama-3.1-8b")
PROGRAM = "from ppd.offline.cli.main import main; main()"
BEGAN_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
DECODES = 3
SESSIONS_PER_S = 1.25
RETURN_SHARE = 0.75  # so a session has four turns in the mean
PAUSE_S, PAUSE_SPREAD = 30.0, 1.2  # median, and of its logarithm
NEW_TOKENS = (20, 200, 2_000)  # of a later turn
FIRST_TOKENS = (500, 4_000, 16_000)
OUTPUT_TOKENS = 200  # mean
SPLIT_SHARE = 0.8  # of first turns
TOKENS_PER_S, TPOT_S, OVERHEAD_S = 20_000.0, 0.012, 0.04
CANDIDATES = CandidatesRecord(
    route=["LOCAL"] * 3 + ["SPLIT"] * 3,
    decode=["D1", "D2", "D3"] * 2,
    prefill=["", "", "", "P1", "P1", "P1"],
    ttft_s=[0.05123, 0.4321, 0.4321, 0.2345, 0.2346, 0.2347],
    tpot_s=[0.01234] * 6,
    terms={name: [0.01234] * 6 for name in ("ttft", "tpot", "streams", "batch", "queue", "evicted", "work", "moved")},
)


class Waiting(msgspec.Struct, order=True):
    """A session whose next turn comes at this time."""

    at_s: float
    number: int
    turn: int = 1
    tokens: int = 0  # of its history
    decode: int = 0


def receipts(count: int, seed: int = 1) -> Iterator[Receipt]:
    """In the order in which their turns came."""
    random, waiting, sessions, next_s = Random(seed), list[Waiting](), 0, 0.0
    for _ in range(count):
        while not waiting or next_s <= waiting[0].at_s:
            sessions += 1
            heappush(waiting, Waiting(next_s, sessions, decode=random.randrange(DECODES)))
            next_s += random.expovariate(SESSIONS_PER_S)
        one = heappop(waiting)
        new_tokens = random.choice(NEW_TOKENS if one.tokens else FIRST_TOKENS)
        output = 1 + int(random.expovariate(1 / OUTPUT_TOKENS))
        calls_tool = random.random() < 0.3
        receipt = _receipt(one, new_tokens, output, is_split=one.turn == 1 and random.random() < SPLIT_SHARE)
        receipt.finish_reason = "tool_calls" if calls_tool else "stop"
        yield receipt
        if random.random() < RETURN_SHARE:
            pause_s = random.lognormvariate(0.0, PAUSE_SPREAD) * (3.0 if calls_tool else PAUSE_S)
            at_s = one.at_s + (receipt.ended_s or 0.0) + pause_s
            heappush(waiting, Waiting(at_s, one.number, one.turn + 1, one.tokens + new_tokens + output, one.decode))


def _receipt(one: Waiting, new_tokens: int, output: int, *, is_split: bool) -> Receipt:
    prompt, computed_s, answer_s = one.tokens + new_tokens, OVERHEAD_S + new_tokens / TOKENS_PER_S, TPOT_S * output
    decode, legs, began_s = f"D{one.decode + 1}", list[LegRecord](), 0.0
    if is_split:
        legs.append(_leg(Leg.PREFILL, "P1", 0.0, computed_s, computed_s))
        began_s = computed_s
    first_s = began_s + (OVERHEAD_S if is_split else computed_s)
    ended_s = first_s + answer_s
    legs.append(_leg(Leg.DECODE if is_split else Leg.LOCAL, decode, began_s, first_s, ended_s))
    return Receipt(
        id=f"{one.number:x}-{one.turn}",
        at=datetime.fromtimestamp(BEGAN_S + one.at_s, UTC).isoformat(timespec="milliseconds"),
        endpoint="/v1/chat/completions",
        model="llama",
        stream=True,
        session=f"{one.number:016x}",
        turn=one.turn,
        kind="next" if one.tokens else "first",
        route="SPLIT" if is_split else "LOCAL",
        reason="slo",
        wanted="SPLIT" if is_split else "LOCAL",
        mode="slo",
        decode=decode,
        prefill="P1" if is_split else "",
        qps=SESSIONS_PER_S,
        estimated_prompt_tokens=prompt,
        estimated_new_tokens=new_tokens,
        estimated_cached_tokens=one.tokens,
        cached_evidence="own_turns" if one.tokens else "",
        estimated_output_tokens=OUTPUT_TOKENS,
        candidates=CANDIDATES,
        predicted_ttft_s=first_s,
        predicted_tpot_s=TPOT_S,
        laws="1",
        legs=legs,
        status=200,
        outcome="completed",
        prompt_tokens=prompt,
        completion_tokens=output,
        cached_tokens=one.tokens,
        ttft_s=first_s,
        tpot_s=TPOT_S if output > 1 else None,
        ended_s=ended_s,
    )


def _leg(kind: Leg, worker: str, began_s: float, first_s: float, ended_s: float) -> LegRecord:
    address = f"{worker.lower()}:8000"
    return LegRecord(
        kind=kind, worker=worker, address=address, started_s=began_s, first_event_s=first_s, ended_s=ended_s, status=200
    )


def write_log(path: Path, count: int) -> None:
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        for receipt in receipts(count):
            file.write(encoder.encode(receipt) + b"\n")


def show_replay(log: Path, count: int) -> None:
    began_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", PROGRAM, "replay", str(log), *FLAGS], check=True, env=os.environ)
    wall_s, after = time.monotonic() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    click.echo(f"\n{count} receipts, {log.stat().st_size / 1e9:.2f} GB")
    click.echo(
        f"{wall_s:.0f} s, {processor_s:.0f} s of processor time, "
        f"{count / processor_s:.0f} receipts a second of it; {after.ru_maxrss / 1e6:.2f} GB of memory at most"
    )


@click.command(help=__doc__)
@click.option("--receipts", "count", default=1_000_000, show_default=True, type=click.IntRange(1))
@click.option("--log", type=click.Path(dir_okay=False, path_type=Path), help="Where the log is written, and stays.")
def main(count: int, log: Path | None) -> None:
    with TemporaryDirectory() as folder:
        path = log or Path(folder) / "receipts.jsonl"
        write_log(path, count)
        show_replay(path, count)


if __name__ == "__main__":
    main()
