"""`ppd doctor`'s output: lines and a table for a terminal, or JSON. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import msgspec
from rich.text import Text

from ..table_view import MUTED, columns, printable
from .values import EngineCounts, Facts, Finding, Level, WorkerFact

SYMBOLS = {Level.OK: "✓", Level.WARN: "!", Level.FAIL: "✗", Level.SKIP: "-"}
ASCII_SYMBOLS = {Level.OK: "+", Level.WARN: "!", Level.FAIL: "x", Level.SKIP: "-"}
STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red", Level.SKIP: MUTED}

_COUNTED = ("computed", "cache hits", "pulled", "expired", "failed")


def lines(findings: Sequence[Finding], *, ascii_only: bool = False) -> Text:
    """One line for each finding, readable without colour."""
    symbols = ASCII_SYMBOLS if ascii_only else SYMBOLS
    width = max((len(finding.check) for finding in findings), default=0)
    text = Text()
    for number, finding in enumerate(findings):
        text.append("\n" if number else "")
        text.append(f"{symbols[finding.level]} {finding.level:<4}", STYLES[finding.level])
        text.append(f"  {finding.check:<{width}}  {printable(finding.message)}")
        if finding.remedy:
            text.append(f" -> {printable(finding.remedy)}", MUTED)
    return text


def verdict(findings: Sequence[Finding]) -> Text:
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    worst = next((level for level in (Level.FAIL, Level.WARN) if counts[level]), Level.OK)
    return Text(", ".join(f"{count} {level}" for level, count in counts.items() if count), STYLES[worst])


def workers_table(facts: Facts) -> Text:
    return columns([("worker", "address", "state", "engine", "connector"), *map(_worker_row, facts.workers)])


def counts_table(facts: Facts) -> Text:
    """Every worker's metrics; `caption` says which period the counts cover. A table of its own: it fits 80 columns."""
    heading = ("worker", "running", "waiting", "KV use", *_COUNTED)
    rows = [heading, *(_counts_row(facts, fact) for fact in facts.workers)]
    return columns(rows, right=range(1, len(heading)))


def caption(facts: Facts) -> str:
    counted = "during the probe conversation" if _is_held(facts) else "since the engine started"
    return f"Metrics; counts {counted}, other clients' requests included:"


def _worker_row(fact: WorkerFact) -> tuple[str, ...]:
    worker = fact.worker
    seen = "healthy" if fact.healthy else "not healthy" if fact.reachable else "not reachable"
    state = fact.state if fact.state and (fact.healthy or fact.state == "down") else seen
    return fact.name, worker.address, state, f"{worker.engine} {worker.engine_version or '?'}", worker.connector


def _counts_row(facts: Facts, fact: WorkerFact) -> tuple[str, ...]:
    load, counts = fact.load, _counts(facts, fact)
    values = [getattr(counts, field.name) if counts else None for field in fields(EngineCounts)]
    return (
        fact.name,
        "?" if load is None else str(load.running),
        "?" if load is None else str(load.waiting),
        "?" if load is None else f"{load.kv_usage:.1%}",
        *("?" if value is None else str(value) for value in values),
    )


def _is_held(facts: Facts) -> bool:
    return facts.conversation is not None and bool(facts.conversation.turns)


def _counts(facts: Facts, fact: WorkerFact) -> EngineCounts | None:
    if facts.conversation is None or not facts.conversation.turns:
        return fact.counts
    grown = [growth for turn in facts.conversation.all_turns if (growth := turn.grown(fact.name)) is not None]
    return EngineCounts.total(grown)


def as_json(facts: Facts, findings: Sequence[Finding]) -> str:
    workers = [
        {
            "name": fact.name,
            "role": fact.role,
            "address": fact.worker.address,
            "state": fact.state,
            "reachable": fact.reachable,
            "healthy": fact.healthy,
            "models": fact.worker.models,
            "engine_version": fact.worker.engine_version,
            "connector": fact.worker.connector,
            "load": fact.load,
            "counts": _counts(facts, fact),
        }
        for fact in facts.workers
    ]
    document = {
        "ok": all(finding.level is not Level.FAIL for finding in findings),
        "findings": findings,
        "counts_of": "conversation" if _is_held(facts) else "lifetime",
        "workers": workers,
        "conversation": facts.conversation,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
