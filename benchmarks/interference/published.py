"""The published measurements (`interference.csv.gz` of the PPD paper's code), as trials for the same figures.

Facts about the rows, from the data and from the program that made them:

* A row is a mean over one batch's requests, with answers of 64 tokens. The times of single tokens were not kept, so
  `overlap` and `stall` are unknown. Decode requests and prefills were sent at the same time.
* `batch_size` counts the prefills; the decode batch is `decode_count`, which is used here.
* `batch_execution_time_ms` lasts until the last request's end, with the prefills' 64 tokens: it says nothing about a
  step. `prefill_success` is true where there was no prefill.
* All decode requests and appends share one 2,048-token context; full prompts have none of it. So the arms differ in
  more than the tokens that the prefill computes: see `NOTE`.
* The program's context experiment (the paper's figure 7; its rows are not here) keeps the full prompt at 1,024 tokens
  and lets the shared context grow, so its growing gap is not due to a longer prefill. Ours computes the context.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from pathlib import Path

from ppd.offline.experiment import files
from ppd.proxy.errors import FormatError

from .records import Experiment, TrialKind
from .slowdowns import FigurePoint, Measured

OUTPUT_TOKENS = 64
_GZIP_MAGIC = b"\x1f\x8b"
_COLUMNS = (
    "decode_avg_tpot_ms",
    "decode_count",
    "decode_success_count",
    "prefill_count",
    "prefill_success",
    "prefill_ttft_ms",
    "prefill_type",
)

NOTE = """\
The published program gives every decode request, and every append, the same 2,048-token context; a full prompt \
shares none of it. `added` is what a whole answer of 64 tokens took longer: at a batch of 200 about 3 s, for one \
prefill of 1,024 tokens that by itself has its first token after about 0.1 s, and hardly more for four prefills than \
for one. That is no prefill's own work, which is paid once: every step is slower for as long as the full prompt's \
request decodes. In kind it fits vLLM's cascade attention, which reads a prefix that all running sequences share \
once for all of them, and is off for the whole batch while one sequence does not share it. In size it is more than \
that reading explains (45 ms a step at 200, where the KV of 200 contexts takes 16 ms at peak bandwidth). Inferred \
from the rows and the program, not tested. On conversations that share nothing this gap between full and append \
should not be there; `--shared-context` measures the published way. The paper prints +48 % and +2 % for one prefill \
at 200, +57 % and +21 % for four; these rows do not give that.\
"""


def load(path: Path) -> list[Measured]:
    return files.load(path, read)


def read(data: bytes) -> list[Measured]:
    """The rows of a CSV file, gzipped or plain; FormatError names the line and the column."""
    try:
        text = (gzip.decompress(data) if data.startswith(_GZIP_MAGIC) else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as exc:
        raise FormatError(f"not a CSV file: {exc}") from exc
    reader = csv.DictReader(io.StringIO(text, newline=""))
    missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise FormatError(f"column {missing[0]} is missing")
    rows = [_measured(reader.line_num, row) for row in reader]
    return [row for row in rows if row is not None]


def _measured(line: int, row: dict[str, str]) -> Measured | None:
    batch, prefills = _number(line, row, "decode_count"), _number(line, row, "prefill_count")
    try:
        kind = TrialKind(row["prefill_type"]) if prefills else TrialKind.ALONE
    except ValueError:
        raise FormatError(f"line {line}: prefill_type: must be full or append, got {row['prefill_type']!r}") from None
    if not batch and not prefills:
        return None
    failed = int(batch - _number(line, row, "decode_success_count"))
    problem = f"{failed} of {batch:g} decode requests failed" if failed else ""
    if prefills and row["prefill_success"] != "True":
        problem = problem or "a prefill failed"
    place = FigurePoint(Experiment.BATCH, kind, int(prefills), int(batch))
    if problem:
        return Measured(place, int(batch), OUTPUT_TOKENS, problem=problem)
    return Measured(
        place,
        int(batch),
        OUTPUT_TOKENS,
        whole_s=_number(line, row, "decode_avg_tpot_ms") / 1000 if batch else None,
        prefill_ttft_s=_number(line, row, "prefill_ttft_ms") / 1000 if prefills else None,
    )


def _number(line: int, row: dict[str, str], column: str) -> float:
    try:
        return float(row[column])
    except (TypeError, ValueError):
        raise FormatError(f"line {line}: {column}: must be a number, got {row[column]!r}") from None
