"""A receipt as text for a terminal: pure functions, readable without colour. Nothing of it can steer the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..config import StageOrder
from ..telemetry.receipts import CandidatesRecord, CellRecord, EncoderRecord, LegRecord, Receipt
from .table_view import MUTED, printable

HEADING = "bold"
CHOSEN = "bold green"
WRONG = "bold red"

EVIDENCE: Final[Mapping[str, str]] = {
    "own_turns": "turns of this conversation ran there",
    "shared_prefix": "turns of other conversations that begin alike ran there",
    "kv_events": "the engine itself told it",
}
COUNTS: Final[Mapping[str, str]] = {  # nothing of the usual: the engine, in the answer
    "report": "by the report of the answering worker's sidecar",
    "estimate": "by nobody: the answer was not seen, and no sidecar reported; the session goes on by estimates",
}
ITEMS: Final[Mapping[str, str]] = {  # docs/encoders.md
    "unnamed": "of Messages: engines hear no name of it",
    "held": "its worker has the embedding",
    "prefix": "its worker has the KV of it",
    "small": "below the least size",
    "busy": "an encoder would take longer than its worker",
    "absent": "no encoder serves the model",
    "never": "by the config",
    "left": "by the picker, to its worker",
}
# Why a way that was wanted was not taken; and reasons that are no mode's.
REASONS: Final[Mapping[str, str]] = {
    "not_resident": "no D is believed to hold the conversation",
    "evicted": "too little of the conversation is believed to be left in the D's cache",
    "decode_restarted": "the D that held the conversation has restarted",
    "decode_gone": "the D that held the conversation has left the fleet",
    "decode_down": "the D that held the conversation is down",
    "decode_draining": "the D that held the conversation is draining",
    "decode_busy": "the D that held the prompt has too much to do",
    "decode_failed": "the D that held the conversation failed this turn, or others just before",
    "no_prefill_worker": "no P can hand over to the D",
    "endpoint_not_split": "the connector of every P cannot split a turn of this endpoint",
    "missing_coordinates": "P or D has not told what its connector must know of it",
    "prefill_failed": "the D's sidecar has lost P, and the D has computed the prompt itself",
    "handoff_failed": "the D could not use what its sidecar got of P, and has computed the prompt itself",
    "prefill_not_asked": "the D's sidecar has not asked P",
    "needs_prefill": "the D cannot compute a prompt itself",
    "no_replica_worker": "there is no R",
    "no_handle": "no D keeps KV of the conversation that could be read back now",
    "not_a_prefix": "the prompt does not begin with the tokens of the KV that D keeps",
    "no_reader": "no P can read back from the D and hand over to it",
    "no_decode_worker": "no D can take the turn",
    "no_table": "mode table has no table in force",
    "no_evidence": "the table has no evidence for a turn like this one",
    "no_profile": "no engine that could take it has a profile",
    "table_local": "the table's score is above 0",
    "table_split": "the table's score is not above 0",
    "first_turn": "a first turn has nothing to append to",
    "stored_response": "the history is stored in that engine",
    "single_engine": "one engine must compute the whole request",
    "forced": "the request forced it",
    "next_best": "Envoy did not reach the chosen worker, and took the next one that the picker had named",
    "ruled": "another picker decided; this one only watched",
    "few_uncached": "the D would have to compute few tokens",
    "many_uncached": "the D would have to compute many tokens",
    "prefill_busy": "every P has much to do",
    "prefill_idle": "a P has little to do",
    "always_disagg": "the decider sends every prompt to a P",
    "prefill_first": "a P computes every prompt, and is chosen first",
    "no_decider": "nothing says that a P should compute prompts",
    "decode_on_replica": "the R that was chosen takes no KV from a P",
    "slo": "the fewest expected misses of targets",
    "explored": "nearly as good as the best way, over a worker that would else be avoided",
    "least_miss": "no way is predicted to meet the targets; this one has the fewest expected misses",
    "weights": "the least weighted sum of predicted TTFT and TPOT",
    "least_ttft": "the earliest predicted first token",
    "lmetric": "the least product of new tokens and batch",
    "slack": "the least TPOT among the ways that keep the TTFT target",
}
# Why a way was not judged.
RULES: Final[Mapping[str, str]] = {
    "full": "it has as many turns as it should have",
    "failed": "it failed this turn, or others just before",
    "down": "its probe fails",
    "draining": "it gets no new turns",
    "no_profile": "nothing is predicted of it",
    "cannot_pair": "P cannot hand over to D",
    "order": "another one was chosen first",
    **{rule: REASONS[rule] for rule in ("missing_coordinates", "no_handle", "not_a_prefix", "no_reader")},
}
_CELL_EVIDENCE: Final[Mapping[str, str]] = {
    "inside": "a measured cell stands for this turn",
    "interpolated": "the turn lies between measured cells",
    "extrapolated": "the turn lies beyond what was measured: the nearest cell's",
    "none": "the cell that would decide was not measured",
}


def told(receipt: Receipt, width: int) -> Iterator[RenderableType]:
    yield _facts(_request(receipt))
    yield _section("Decision", _facts(_decision(receipt)))
    if receipt.cell is not None:
        yield _section("Table", _facts(_cell(receipt.cell)))
    if receipt.candidates is not None:
        heading = f"Ways that were judged, the best first{f' (laws {receipt.laws})' if receipt.laws else ''}"
        yield _section(heading, _ways(receipt.candidates, width))
    if receipt.encoder is not None:
        yield _section("Encoders (seconds from the turn's arrival)", _facts([*_encoder(receipt.encoder)]))
    if receipt.legs:
        yield _section("Legs (seconds from the turn's arrival)", _legs(receipt.legs))
    yield _section("Predicted and measured", _outcome(receipt))


def _encoder(record: EncoderRecord) -> Iterator[tuple[str, str]]:
    yield "items", ", ".join(map(_item, record.items)) or "the client left meanwhile"
    if record.on_encoder_s is not None or record.in_place_s is not None:
        on_encoder, in_place = _seconds(record.on_encoder_s), _seconds(record.in_place_s)
        yield "an item takes", f"{on_encoder} s at an encoder, {in_place} s in place"
    if record.legs:
        yield "waited", f"{record.waited_s:.3f} s from {record.began_s:.3f} on"
    for leg in record.legs:
        ended = "" if leg.ended_s is None else f"{leg.ended_s:.3f}"
        yield leg.worker, f"{leg.started_s:.3f} to {ended}, {leg.items} items{f': {leg.error}' if leg.error else ''}"


def _item(told: str) -> str:
    why = ITEMS.get(told.rpartition(": ")[2])
    return told if why is None else f"{told} ({why})"


def _section(heading: str, content: RenderableType) -> RenderableType:
    both = Table.grid()
    both.add_row(Text(f"\n{printable(heading)}", HEADING))
    both.add_row(content)
    return both


def _facts(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style=MUTED, no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        if text:
            table.add_row(Text(printable(name)), Text(printable(text)))
    return table


def _request(receipt: Receipt) -> list[tuple[str, str]]:
    by = f" by key {receipt.client}" if receipt.client else ""
    streamed = ", streamed" if receipt.stream else ""
    ended = f"{receipt.outcome}, status {receipt.status}" if receipt.status else receipt.outcome
    return [
        ("request", receipt.id),
        ("at", receipt.at),
        ("asked", f"{receipt.endpoint}{by}, model {receipt.model}{streamed}"),
        ("turn", f"{receipt.turn} of session {receipt.session} ({receipt.kind})" if receipt.session else ""),
        ("ended", f"{ended}: {receipt.error}" if receipt.error else ended),
        ("counted", COUNTS.get(receipt.counts_evidence, "")),
    ]


# -- the decision


def _decision(receipt: Receipt) -> list[tuple[str, str]]:
    if not receipt.route:
        return [("route", "none: the turn ended before it was decided"), ("waited", f"{receipt.waited_s:.3f} s")]
    slo = receipt.slo
    return [
        ("route", _way(receipt.route, receipt.decode, receipt.prefill)),
        ("because", f"{receipt.reason}{_in_words(receipt.reason)} ({_rules(receipt)})"),
        ("wanted", f"{receipt.wanted}, by the request itself" if receipt.forced else receipt.wanted),
        ("vetoes", "; ".join(f"{veto}{_in_words(veto)}" for veto in receipt.vetoes)),
        ("prompt", _prompt(receipt)),
        ("answer", f"about {receipt.estimated_output_tokens} tokens were expected"),
        ("rate", f"{receipt.qps:g} a second"),
        ("waited", f"{receipt.waited_s:.3f} s in the queue"),
        (
            "targets",
            f"TTFT {slo.ttft_s:g} s, or {slo.ttft_factor:g} x that of an idle engine if that is more; "
            f"TPOT {slo.tpot_s:g} s",
        ),
    ]


def _rules(receipt: Receipt) -> str:
    order = "" if receipt.order in ("", StageOrder.MODE) else f", order {receipt.order}"
    return f"mode {receipt.mode}{order}"


def _in_words(reason: str) -> str:
    return f": {REASONS[reason]}" if reason in REASONS else ""


def _prompt(receipt: Receipt) -> str:
    counted = "counted by the tokenizer" if receipt.prompt_evidence == "tokenizer" else "estimated"
    text = f"{receipt.estimated_prompt_tokens} tokens, {counted}; "
    if not receipt.estimated_cached_tokens:
        return f"{text}none of them believed to be held by {receipt.decode}"
    why = EVIDENCE.get(receipt.cached_evidence, receipt.cached_evidence)
    return f"{text}{receipt.estimated_cached_tokens} believed to be held by {receipt.decode}: {why}"


def _cell(cell: CellRecord) -> list[tuple[str, str]]:
    rows = [
        ("asked", f"{cell.table}, cell {cell.cell} ({cell.lookup})"),
        ("evidence", _CELL_EVIDENCE.get(cell.evidence, cell.evidence)),
    ]
    if cell.score is None or cell.d_ttft is None or cell.d_tpot is None:
        return [*rows, ("score", "none")]
    verdict = "above 0, so LOCAL" if cell.score > 0 else "not above 0, so SPLIT"
    ttft = f"LOCAL {_change(cell.d_ttft, 'saves', 'adds')} of TTFT (weight {cell.w_ttft:g})"
    tpot = f"{_change(cell.d_tpot, 'adds', 'saves')} of TPOT (weight {cell.w_tpot:g})"
    return [*rows, ("measured", f"{ttft} and {tpot}"), ("score", f"{cell.score:+.3f}: {verdict}")]


def _change(share: float, positive: str, negative: str) -> str:
    return f"{positive if share >= 0 else negative} {abs(share):.1%}"


# -- the ways that were judged


def _way(route: str, decode: str, prefill: str = "", source: str = "", fetched_tokens: int = 0) -> str:
    fetched = f", {fetched_tokens} tokens from {source}" if source else ""
    return f"{route} {f'{prefill} > {decode}' if prefill else decode}{fetched}"


def _ways(found: CandidatesRecord, width: int) -> Table:
    """A column for each term where the terminal is wide enough; else all in one."""
    rows = [_cells(found, number) for number in range(len(found.route))]
    heading = ["", "way", "held", "TTFT s", "TPOT s", "score"]
    split = [*heading, *found.terms]
    needed = sum(max(map(len, column)) + 2 for column in zip(split, *rows, strict=True))
    is_wide = bool(found.terms) and needed <= width and not found.excluded
    table = _plain(split if is_wide else [*heading, "terms" if found.terms else ""], right=range(2, len(split)))
    for number, row in enumerate(rows):
        cells = row if is_wide else [*row[:6], _last(found, number, row[6:])]
        table.add_row(*(Text(printable(cell)) for cell in cells), style=CHOSEN if number == found.chosen else "")
    if not is_wide and found.terms:
        table.columns[-1].justify, table.columns[-1].overflow, table.columns[-1].no_wrap = "left", "fold", False
    table.columns[1].no_wrap = False
    return table


def _cells(found: CandidatesRecord, number: int) -> list[str]:
    def at(column: Sequence[str]) -> str:
        return column[number] if number < len(column) else ""

    fetched = found.fetched_tokens[number] if number < len(found.fetched_tokens) else 0
    way = _way(found.route[number], at(found.decode), at(found.prefill), at(found.source), fetched)
    terms = [_figure(column, number) for column in found.terms.values()]
    scores = [column[number] or 0.0 for column in found.terms.values() if number < len(column)]
    is_judged = _figure(found.ttft_s, number) != "-"
    score = f"{sum(scores):.4g}" if is_judged and scores else "-"
    held = str(_held(found, at(found.prefill) or at(found.decode)))
    mark = ">" if number == found.chosen else ""
    return [mark, way, held, _figure(found.ttft_s, number), _figure(found.tpot_s, number), score, *terms]


def _held(found: CandidatesRecord, worker: str) -> int:
    """Tokens of the prompt, where it would be computed."""
    return max((workers.get(worker, 0) for workers in found.held.values()), default=0)


def _figure(column: Sequence[float | None], number: int) -> str:
    value = column[number] if number < len(column) else None
    return "-" if value is None else f"{value:.4g}"


def _last(found: CandidatesRecord, number: int, terms: Sequence[str]) -> str:
    if number < len(found.excluded) and found.excluded[number]:
        rule = found.excluded[number]
        return f"excluded: {rule}{f': {RULES[rule]}' if rule in RULES else ''}"
    return ", ".join(f"{name} {term}" for name, term in zip(found.terms, terms, strict=True) if term not in ("0", "-"))


def _plain(heading: Sequence[str], right: Sequence[int] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style=HEADING, pad_edge=False)
    for number, name in enumerate(heading):
        table.add_column(Text(printable(name)), justify="right" if number in right else "left", no_wrap=True)
    return table


# -- how it went


def _legs(legs: Sequence[LegRecord]) -> Table:
    table = _plain(["leg", "worker", "began", "first", "ended", "status", "failed"], right=range(2, 6))
    table.columns[6].no_wrap = False
    for leg in legs:
        failed = f"{leg.error} at {leg.phase}" if leg.error else ""
        if leg.events is not None:
            failed += f", after {leg.events} events"
        worker = f"{leg.worker}, by {leg.told_by}" if leg.told_by else leg.worker
        row = (leg.kind, worker, _seconds(leg.started_s), _seconds(leg.first_event_s), _seconds(leg.ended_s))
        status = "-" if leg.status is None else str(leg.status)
        table.add_row(*(Text(printable(cell)) for cell in (*row, status, failed)), style=WRONG if leg.error else "")
    return table


def _outcome(receipt: Receipt) -> Table:
    table = _plain(["", "predicted", "measured", "off by"], right=range(1, 4))
    table.add_row("TTFT s", _seconds(receipt.predicted_ttft_s), _seconds(receipt.ttft_s), _share(receipt.ttft_error))
    table.add_row("TPOT s", _seconds(receipt.predicted_tpot_s), _seconds(receipt.tpot_s), _share(receipt.tpot_error))
    counts = (
        ("prompt tokens", receipt.estimated_prompt_tokens, receipt.prompt_tokens),
        ("cached tokens", receipt.estimated_cached_tokens, receipt.cached_tokens),
        ("answer tokens", receipt.estimated_output_tokens, receipt.completion_tokens),
    )
    for name, expected, seen in counts:
        error = seen / expected - 1.0 if seen is not None and expected else None
        table.add_row(name, str(expected), "-" if seen is None else str(seen), _share(error))
    table.add_row("whole turn s", "-", _seconds(receipt.ended_s), "")
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:+.0%}"
