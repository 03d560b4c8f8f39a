"""`ppd doctor`'s check of KV that is read back: do the P that say they can, and D that say they keep it?

A P that has it not would hang on each handle until the proxy's time-out for P's leg.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...connectors import reads_back
from ...fleet.worker import Role
from ...policy import Route
from .values import Facts, Finding, Level, TurnFact

_CHECK = "readback"
_ENOUGH = 0.5  # this share of the first turn is evidence
_SWITCH = 'Start it with {{"bidirectional_kv_xfer": true}} in its kv_connector_extra_config, or take {} away.'


def may_read_back(facts: Facts) -> bool:
    """Whether a P and a D that serve say so; and whether a route can be forced."""
    return facts.can_force and all(_saying(facts, role) for role in (Role.PREFILL, Role.DECODE))


def _saying(facts: Facts, role: Role) -> list[str]:
    return [fact.name for fact in facts.serving(role) if reads_back(fact.worker)]


def reading_back_works(facts: Facts) -> Iterator[Finding]:
    by_p, by_d = _saying(facts, Role.PREFILL), _saying(facts, Role.DECODE)
    if bool(by_p) != bool(by_d):
        said = f"{', '.join(by_p or by_d)} reads back, but no {'D' if by_p else 'P'} does: nothing is read"
        yield Finding(Level.WARN, _CHECK, said, "Say bidirectional_kv_xfer=true of both P and D, or of none.")
    turns = facts.conversation.read_back if facts.conversation is not None else ()
    if len(turns) == 2:
        yield _found(*turns)
    elif turns:
        yield Finding(Level.SKIP, _CHECK, f"the turn before was not answered: {turns[0].error}")


def _found(first: TurnFact, second: TurnFact) -> Finding:
    """1. P hung or refused.  2. The proxy did not answer, or knew nothing of the turn before.  3. D kept nothing.
    4. P does not tell.  5. P read.  6. P computed it all."""
    prefill = second.prefill or first.prefill
    remedy = _SWITCH.format(f"bidirectional_kv_xfer of {prefill}")
    if second.is_late or second.handoff_missing or second.failed_legs:
        why = second.error or second.handoff_missing or second.failed_legs
        return Finding(Level.FAIL, _CHECK, f"{prefill} did not read back from {first.decode}: {why}", remedy)
    if second.status != 200:
        return Finding(Level.SKIP, _CHECK, f"the turn was not answered: {second.error}")
    if second.number == 1:
        said = "the proxy did not know the turn before: it has restarted, or has lost the session. Run the doctor again"
        return Finding(Level.SKIP, _CHECK, said)
    if second.route != Route.READBACK:
        said = f"{first.decode} told no handle of what it keeps ({second.reason})"
        return Finding(Level.WARN, _CHECK, said, _SWITCH.format(f"bidirectional_kv_xfer of {first.decode}"))
    grown = second.grown(second.prefill)
    if grown is None or grown.transferred is None:
        return Finding(Level.SKIP, _CHECK, f"the metrics of {second.prefill} do not tell what it read back")
    said = f"{second.prefill} read back {grown.transferred} tokens from {first.decode}"
    if grown.transferred >= _ENOUGH * first.prompt_tokens:
        return Finding(Level.OK, _CHECK, said)
    return Finding(Level.WARN, _CHECK, f"{said}, which has {first.prompt_tokens} of the turn before", remedy)
