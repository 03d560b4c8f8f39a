"""What was found, as records and as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ppd.offline.experiment.statistics import percentile
from ppd.proxy.errors import FormatError
from ppd.proxy.laws.profile_file import ProfileFile

from ..overhead.records import Machine
from .modes import ANSWERING, ModeRecord, together
from .play import PlayedTurn

VERSION = 1
_HEAD = (
    "mode",
    "turns",
    "LOCAL / SPLIT",
    "hits on D",
    "believed",
    "refuted",
    "hits on P",
    "computed on P, on D",
    "of what is new",
    "moved, MB",
    "evicted on P, on D",
    "TTFT p50, p99, ms",
    "failed",
    "wrong texts",
)


class EvictionRun(msgspec.Struct, frozen=True, kw_only=True):
    date: str
    command: str
    machine: Machine
    vllm: str
    blocks: int  # of 32 tokens, that each engine has
    conversations: int
    turns_each: int
    needed_tokens: int  # by the conversations' last turns, with their answers
    capacity_tokens: int  # of all D and R
    at_once: int
    seed: int
    alone: list[ModeRecord]  # the same turns on one engine with room for all: what numerics alone can do
    modes: list[ModeRecord]  # each round's
    slo_flags: dict[str, str]
    profile: ProfileFile
    version: int = VERSION


def encode(run: EvictionRun) -> bytes:
    """One turn a line, so that two files can be compared line by line."""
    return msgspec.json.encode(run).replace(b"],[", b"],\n[") + b"\n"


def decode(data: bytes) -> EvictionRun:
    try:
        run = msgspec.json.decode(data, type=EvictionRun)
    except msgspec.DecodeError as exc:
        raise FormatError(f"records of modes on engines that evict: {exc}") from exc
    if run.version != VERSION:
        raise FormatError(f"records of modes on engines that evict: version {run.version}, known is {VERSION}")
    return run


def needed_tokens(turns: Sequence[PlayedTurn]) -> int:
    """What caches would have to hold at the end for no conversation to lack anything."""
    longest: dict[int, int] = {}
    for turn in turns:
        longest[turn.conversation] = max(longest.get(turn.conversation, 0), turn.prompt_tokens + turn.answer_tokens)
    return sum(longest.values())


def table(rounds: Sequence[ModeRecord]) -> str:
    modes = dict.fromkeys(record.mode for record in rounds)
    rows = [_row([record for record in rounds if record.mode == mode]) for mode in modes]
    lines = [_HEAD, ("---", *["---:"] * (len(_HEAD) - 1)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _row(rounds: Sequence[ModeRecord]) -> tuple[str, ...]:
    record = together(rounds)
    shares = sorted(one.hit_share for one in rounds)
    on_p, on_d, routes = record.of("P"), record.of(*ANSWERING), record.routes
    first_s = [turn.ttft_s for turn in record.turns if turn.ttft_s is not None]
    ttft = ", ".join(f"{percentile(first_s, share) * 1e3:.0f}" for share in (0.5, 0.99)) if first_s else "none"
    return (
        f"`{record.mode}`",
        str(len(record.turns)),
        f"{routes['LOCAL']} / {routes['SPLIT']}",
        f"{record.hit_share:.3f}" + (f" ({shares[0]:.3f} to {shares[-1]:.3f})" if len(shares) > 1 else ""),
        _share(record.claimed_tokens, record.prompt_tokens),
        str(record.refuted),
        _share(on_p.hit, on_p.prompts),
        f"{on_p.computed:,}, {on_d.computed:,}",
        f"{(on_p.computed + on_d.computed) / max(1, record.new_tokens):.2f}",
        f"{on_d.moved_bytes / 1e6:.1f}",
        f"{on_p.evicted_blocks:,}, {on_d.evicted_blocks:,}",
        ttft,
        str(record.failed),
        str(record.wrong),
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "none"


def page(run: EvictionRun) -> str:
    return f"{about(run)}\n\n{table(run.modes)}"


def about(run: EvictionRun) -> str:
    machine = run.machine
    times = run.needed_tokens / run.capacity_tokens
    answering = sum(name.startswith(ANSWERING) for name in run.modes[0].engines) if run.modes else 0
    alone = ", ".join(f"{record.wrong} of {len(record.turns)} ({record.mode})" for record in run.alone)
    rounds = f"{len({record.round for record in run.modes})} rounds"
    slo = ", ".join(f"{name} {value}" for name, value in run.slo_flags.items() if name != "profile")
    return (
        f"{run.date}: vLLM {run.vllm} on {machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, Linux "
        f"{machine.kernel}, Python {machine.python}. {run.conversations} conversations of {run.turns_each} turns, "
        f"{run.at_once} at once, seed {run.seed}, {rounds}: {run.needed_tokens:,} tokens of KV, {times:.1f} times what "
        f"the engines that answer ({answering}) hold together. One engine with room for all, asked for the same: wrong "
        f"texts {alone}. `slo`: {slo}, and a profile that this run measured ({run.profile.note})"
    )
