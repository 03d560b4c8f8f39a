"""`ppd doctor`'s checks of its probe conversation: did the KV move, and did the caches hit?

Other clients' requests move the counters too, so no check asks for exact numbers. If a counter grew by at least half of
what the probe alone must cause, that is evidence that it works; if it did not grow, that is evidence that it does not.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...fleet.worker import Role
from ...policy import Route
from . import remedies
from .values import EngineCounts, Facts, Finding, Level, ProbeConversation, TurnFact, WorkerFact

ENOUGH = 0.5  # this share of the expected tokens is evidence
LOGS = "Look up the request in the logs of the proxy and of its workers."
MODELS_SHOWN = 5
FEW_TOKENS = 64  # fewer may be the rest of a prompt that does not fill a KV block
AVOIDED = frozenset({"no_prefill_worker", "no_decode_worker"})  # reasons; the workers may be up, but fail

BY_KV_ALONE = ("sglang", "trtllm", "trtllm_gen_first")  # their D computes no prompt that it was to get from P
UNCOUNTED = ("mooncake", "moriio", "moriio_read", "p2p_nccl")  # whose engines count no failed transfers


def turns_are_answered(facts: Facts) -> Iterator[Finding]:
    conversation = facts.conversation
    if conversation is None:
        return
    if conversation.skipped:
        yield Finding(Level.SKIP, "conversation", conversation.skipped)
    for index, turn in enumerate(conversation.turns, 1):
        yield _answered(f"turn {index}", turn, index)
    served = {model for fact in facts.workers for model in fact.worker.models}
    if conversation.turns and (others := sorted(served - {conversation.model})):
        yield Finding(Level.SKIP, "other models", f"{_shortened(others)} not asked", "Give --model for one of them.")


def _shortened(names: list[str]) -> str:
    more = len(names) - MODELS_SHOWN
    shown = ", ".join(names[:MODELS_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return f"{shown} {'was' if len(names) == 1 else 'were'}"


def _answered(check: str, turn: TurnFact, number: int) -> Finding:
    if turn.status != 200:
        what = f"answered with {turn.status}" if turn.status else "not answered"
        remedy = LOGS
        if turn.status in (401, 403):
            remedy = "Give a key: --client-key or PPD_CLIENT_KEY; the proxy's keys_file says who may ask for what."
        return Finding(Level.FAIL, check, f"{what}: {turn.error}", remedy)
    workers = f"{turn.prefill} -> {turn.decode}" if turn.prefill else turn.decode
    cached = "unknown" if turn.cached_tokens is None else turn.cached_tokens
    said = f"{turn.route} on {workers} ({turn.reason}), {turn.prompt_tokens} prompt tokens, {cached} cached"
    if turn.number and turn.number != number:
        remedy = "Look whether the proxy has restarted, or something before it changes messages or drops X-Session-ID."
        return Finding(Level.WARN, check, f"{said}; taken for turn {turn.number} of its session", remedy)
    if turn.failed_legs:
        return Finding(Level.WARN, check, f"{said}; {turn.failed_legs}", LOGS)
    return Finding(Level.OK, check, said)


def handoff_works(facts: Facts) -> Iterator[Finding]:
    """On a SPLIT turn D must pull the part of the prompt that it does not hold."""
    check = "handoff"
    conversation = _answered_conversation(facts)
    if conversation is None:
        return
    numbered = ((f"turn {index}", turn) for index, turn in enumerate(conversation.turns, 1))
    splits = [(which, turn) for which, turn in (*numbered, *_forced(facts)) if turn.prefill or turn.status != 200]
    if not splits:
        yield _no_split(check, facts, conversation)
    for which, turn in splits:
        yield _moved(check, which, turn, _worker(facts, turn.prefill))


def _forced(facts: Facts) -> Iterator[tuple[str, TurnFact]]:
    for turn in facts.conversation.forced if facts.conversation is not None else ():
        yield "a forced SPLIT", turn


def _no_split(check: str, facts: Facts, conversation: ProbeConversation) -> Finding:
    if not facts.serving(Role.PREFILL):
        return Finding(Level.SKIP, check, "no P serves, so nothing is handed over")
    reasons = [turn.reason for turn in conversation.turns]
    said = f"no turn of the conversation was SPLIT: {', '.join(reasons)}"
    can_split = facts.proxy is not None and "split" in facts.proxy.ways
    if can_split and not AVOIDED.isdisjoint(reasons):
        remedy = "Look in the proxy's log for workers and pairs that get no turns for a while, and why."
        return Finding(Level.WARN, check, f"{said}, although P and D are up", remedy)
    return Finding(Level.SKIP, check, said)


def _moved(check: str, which: str, turn: TurnFact, prefill: WorkerFact | None) -> Finding:
    """1. It was not answered.  2. P's answer had no handoff.  3. D answers by P's KV alone.  4. D's metrics are silent.
    5. D held it all.  6. D pulled.  7. D computed it."""
    connector = prefill.worker.connector if prefill else ""
    if turn.status != 200:
        return Finding(Level.FAIL, check, f"{which} was not answered: {turn.error}", LOGS)
    if turn.handoff_missing:
        said = f"{which}: {turn.prefill}'s answer held no usable handoff ({turn.handoff_missing})"
        return Finding(Level.FAIL, check, said, remedies.no_handoff(connector))
    if connector in BY_KV_ALONE:
        said = f"{which}: {turn.decode} answered, which it does with the KV of {turn.prefill} alone"
        return Finding(Level.OK, check, said)
    grown = turn.grown(turn.decode)
    if grown is None or grown.transferred is None:
        said = f"{which}: the metrics of {turn.decode} do not tell what it pulled"
        is_other = prefill is not None and prefill.worker.engine in remedies.OTHERS
        remedy = "" if is_other else "Run the doctor where the worker's /metrics can be read."
        return Finding(Level.SKIP, check, said, remedy)
    return _pulled(check, which, turn, grown, connector)


def _pulled(check: str, which: str, turn: TurnFact, grown: EngineCounts, connector: str) -> Finding:
    """A first turn is in no cache: what D finds there without having asked, P has put there."""
    hits, moved = grown.local_hits or 0, grown.transferred or 0
    if which != "turn 2" and connector == "lmcache":
        hits, moved = 0, moved + hits
    lacked = max(0, turn.prompt_tokens - hits)
    if lacked < FEW_TOKENS and not moved:
        return Finding(Level.SKIP, check, f"{which}: {turn.decode} held nearly all of the prompt already")
    amount = f"{moved} of the {lacked} tokens that {turn.decode} lacked"
    if moved >= ENOUGH * lacked:
        return Finding(Level.OK, check, f"{which}: {amount} came from {turn.prefill}")
    remedy = remedies.HANDOFF.get(connector, remedies.HANDOFF["nixl"])
    if moved:
        return Finding(Level.WARN, check, f"{which}: only {amount} came from outside", remedy)
    said = f"{which}: handoff does not work: {turn.decode} pulled nothing and computed {_shown(grown.computed)} tokens"
    return Finding(Level.WARN if connector == "lmcache" else Level.FAIL, check, said, remedy)


def prefill_computes(facts: Facts) -> Iterator[Finding]:
    """Turn 1 is in no cache, so P must have computed it."""
    check = "prefill"
    conversation = _answered_conversation(facts)
    if conversation is None or conversation.turns[0].route != Route.SPLIT:
        return
    turn = conversation.turns[0]
    grown = turn.grown(turn.prefill)
    if grown is None or grown.computed is None:
        yield Finding(Level.SKIP, check, f"the metrics of {turn.prefill} do not tell what it computed")
    elif grown.computed + (grown.local_hits or 0) >= ENOUGH * turn.prompt_tokens:
        yield Finding(Level.OK, check, f"{turn.prefill} computed {grown.computed} tokens of turn 1")
    else:
        said = f"{turn.prefill} computed {grown.computed} of {turn.prompt_tokens} tokens of turn 1"
        remedy = "Look whether its address is the engine itself: behind a balancer, metrics are another engine's."
        yield Finding(Level.WARN, check, said, remedy)


def follow_ups_hit_the_cache(facts: Facts) -> Iterator[Finding]:
    """Turn 2 starts with all of turn 1, so a worker of both turns must find turn 1 in its cache."""
    check = "prefix cache"
    conversation = _answered_conversation(facts)
    if conversation is None:
        return
    if len(conversation.turns) < 2:
        yield Finding(Level.SKIP, check, "the conversation has no second turn")
        return
    first, second = conversation.turns
    found = [(name, _hits(second, name)) for name in _same_workers(facts, first, second)]
    if not found:
        yield Finding(Level.SKIP, check, "turn 2 met none of turn 1's workers that keep prefixes")
        return
    worker, hits = next((each for each in found if each[1] is not None), found[0])
    engine = fact.worker.engine if (fact := _worker(facts, worker)) else "vllm"
    if hits is None:
        said = f"neither metrics nor usage tell what {worker} had cached"
        yield Finding(Level.WARN, check, said, remedies.counting(engine))
    elif hits >= ENOUGH * first.prompt_tokens:
        yield Finding(Level.OK, check, f"{worker} found {hits} of {second.prompt_tokens} tokens of turn 2")
    else:
        said = f"{worker} found {hits} of the {first.prompt_tokens} tokens that it held since turn 1"
        yield Finding(Level.FAIL, check, said, remedies.caching(engine))


def _same_workers(facts: Facts, first: TurnFact, second: TurnFact) -> list[str]:
    """The workers of both turns: the D or R that answered, and the P. Not one that is known to keep nothing."""
    both = [one for one, other in ((first.decode, second.decode), (first.prefill, second.prefill)) if one == other]
    kept = ((name, _worker(facts, name)) for name in both if name)
    return [name for name, fact in kept if fact is None or fact.worker.keeps_prefixes]


def _hits(turn: TurnFact, worker: str) -> int | None:
    """From the metrics, else from the answer's usage, which after a handoff is P's."""
    grown = turn.grown(worker)
    if grown is not None and grown.local_hits is not None:
        return grown.local_hits
    is_own = not turn.prefill or worker == turn.prefill
    return turn.cached_tokens if is_own else None


def nothing_is_lost(facts: Facts) -> Iterator[Finding]:
    conversation = _answered_conversation(facts)
    if conversation is None:
        return
    for fact in facts.workers:
        growth = [grown for turn in conversation.turns if (grown := turn.grown(fact.name)) is not None]
        if expired := _sum(growth, "expired"):
            remedy = "Look for D legs that start late: P keeps a prompt for 30 s after it answered."
            yield Finding(Level.WARN, "expired handoffs", f"{expired} on {fact.name} during the probe", remedy)
        if failed := _sum(growth, "failed"):
            remedy = remedies.HANDOFF.get(fact.worker.connector, remedies.HANDOFF["nixl"])
            yield Finding(Level.WARN, "failed transfers", f"{failed} on {fact.name} during the probe", remedy)
    names = [turn.decode for turn in conversation.turns if turn.prefill]
    silent = [name for name in dict.fromkeys(names) if (fact_of := _worker(facts, name)) and _counts_none(fact_of)]
    if silent:
        said = f"the metrics of {', '.join(silent)} count none, whatever fails"
        yield Finding(Level.SKIP, "failed transfers", said, "Look at their logs.")


def _counts_none(fact: WorkerFact) -> bool:
    return fact.worker.engine in remedies.OTHERS or fact.worker.connector in UNCOUNTED


def _sum(growth: list[EngineCounts], name: str) -> int:
    return sum(getattr(grown, name) or 0 for grown in growth)


def _answered_conversation(facts: Facts) -> ProbeConversation | None:
    """The conversation with its answered turns only; None if there are none."""
    if facts.conversation is None:
        return None
    turns = tuple(turn for turn in facts.conversation.turns if turn.status == 200)
    return ProbeConversation(model=facts.conversation.model, turns=turns) if turns else None


def _worker(facts: Facts, name: str) -> WorkerFact | None:
    return next((fact for fact in facts.workers if fact.name == name), None)


def _shown(count: int | None) -> str:
    return "an unknown number of" if count is None else str(count)
