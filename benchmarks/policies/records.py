"""What came of the cells: a file of JSON lines for each, one line a mode, to which a run appends."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from pathlib import Path
from statistics import fmean

import msgspec

from ppd.offline.experiment import files

logger = logging.getLogger(__name__)


class AtRate(msgspec.Struct, frozen=True, kw_only=True):
    """A mode's figures at one rate, over the turns of all seeds. Times in s; None: no turn got so far."""

    rate: float
    tpot_s: float = 0.025  # the target, by which some modes decide too; lines that lack it are of this one
    seeds: int
    turns: int
    unfinished: int
    first_share: float  # within the SLO, of first turns
    later_share: float
    ttft_first: tuple[float | None, float | None]  # median and 99th percentile
    ttft_later: tuple[float | None, float | None]
    tpot: tuple[float | None, float | None]
    moved_bytes_a_turn: float  # of KV between workers
    recomputed_share: float  # of what the session's turn before had, that was computed again
    prefill_ratio: float  # tokens computed over those that no earlier turn of the session had


class CellRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One mode in one cell."""

    cell: str
    mode: str
    goodput: dict[str, tuple[float, ...]]  # by "TPOT ms@share": sessions a second, of each seed
    at_rate: AtRate | None = None
    windows: int = 0  # played
    cpu_s: float = 0.0
    method: str = ""  # of measuring: outcomes of others are passed over

    def mean(self, question: str) -> float | None:
        rates = self.goodput.get(question)
        return fmean(rates) if rates else None

    def played(self, tpot_s: float) -> AtRate | None:
        """The figures at a rate, if they are by this target."""
        return self.at_rate if self.at_rate is not None and self.at_rate.tpot_s == tpot_s else None


_LINE = msgspec.json.Decoder(CellRecord)


def append(folder: Path, outcome: CellRecord) -> None:
    """On a line of its own, also where the line before was not finished."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{outcome.cell}.jsonl"
    with path.open("ab+") as file:
        begun = file.tell() and _last_byte(path) != b"\n"
        file.write((b"\n" if begun else b"") + msgspec.json.encode(outcome) + b"\n")


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1)


def load(folder: Path, cell: str, method: str) -> dict[str, CellRecord]:
    """By mode, the newest of each; a line that is damaged is named and passed over."""
    path = folder / f"{cell}.jsonl"
    found: dict[str, CellRecord] = {}
    if not path.is_file():
        return found
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            outcome = _LINE.decode(line)
        except files.UNREADABLE:
            logger.warning("%s:%d is damaged and left out", path, number)
            continue
        if outcome.method == method:
            found[outcome.mode] = outcome
    return found


def load_all(folder: Path, cells: Iterable[str], method: str) -> dict[str, dict[str, CellRecord]]:
    return {cell: found for cell in cells if (found := load(folder, cell, method))}


def forget(folder: Path, cell: str, modes: Collection[str], method: str, questions: Collection[str]) -> None:
    """What these modes were measured to answer to these questions by this method, and their figures at a rate."""
    path = folder / f"{cell}.jsonl"
    if not path.is_file():
        return
    lines = list[bytes]()
    for line in path.read_bytes().splitlines():
        try:
            outcome = _LINE.decode(line)
        except files.UNREADABLE:
            outcome = None
        if outcome is None or outcome.mode not in modes or outcome.method != method:
            lines.append(line)
        elif (left := _without(outcome, questions)) is not None:
            lines.append(msgspec.json.encode(left))
    files.write_whole(path, b"".join(line + b"\n" for line in lines))


def _without(outcome: CellRecord, questions: Collection[str]) -> CellRecord | None:
    """None: nothing is left. What the rest has cost is taken to be its share of the answers."""
    goodput = {name: rates for name, rates in outcome.goodput.items() if name not in questions}
    if not goodput:
        return None
    left, all_answers = (sum(map(len, answers.values())) for answers in (goodput, outcome.goodput))
    share = left / max(1, all_answers)
    windows, cpu_s = round(outcome.windows * share), outcome.cpu_s * share
    return msgspec.structs.replace(outcome, goodput=goodput, at_rate=None, windows=windows, cpu_s=cpu_s)
