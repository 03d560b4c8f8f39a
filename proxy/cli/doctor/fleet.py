"""`ppd doctor`'s checks of a fleet: are its workers there, and can they work with each other?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ...config import Mode
from ...connectors import CONNECTORS, answers_alone, can_pair, missing_coordinates, takes_either_leg
from ...connectors.prefill import engine_version
from ...encoders.choosing import takes_embeddings
from ...fleet.worker import PREFIX_CACHE, Role
from ...health.probe import UNTRUSTED
from . import remedies
from .values import Facts, Finding, Level, WorkerFact

P2P_NCCL_ENDED = (0, 24)  # the first vLLM version without this connector


def workers_answer(facts: Facts) -> Iterator[Finding]:
    check = "workers"
    if facts.config is None and (facts.proxy is None or facts.proxy.error):
        return
    if not facts.workers:
        yield _no_workers(check, facts)
        return
    troubles = [finding for fact in facts.workers for finding in _troubles(check, fact)]
    if not troubles:
        yield Finding(Level.OK, check, f"all healthy: {_names(facts.workers)}")
    yield from troubles


def _no_workers(check: str, facts: Facts) -> Finding:
    if facts.proxy is not None and facts.proxy.admin_status != 200:
        return Finding(Level.SKIP, check, "which workers there are is not known without the admin API")
    if facts.proxy is not None:
        remedy = "Start `ppd agent` beside each engine, or name the engines in the config's `workers`."
        return Finding(Level.FAIL, check, "the proxy knows no worker", remedy)
    return Finding(Level.SKIP, check, "the config names none: agents will announce them to the running proxy")


def _troubles(check: str, fact: WorkerFact) -> Iterator[Finding]:
    """If a proxy reports the worker's state, that counts: the worker may be unreachable only from here."""
    who = f"{fact.name} at {fact.worker.address}"
    why = f": {fact.why}" if fact.why else ""
    if fact.why.startswith(UNTRUSTED):
        remedy = "Set worker_ca_file to the authority that signed it, and name the worker as its certificate does."
        yield Finding(Level.FAIL, check, f"{who} cannot be spoken to{why}", remedy)
    elif fact.wants_key and not fact.state:  # without a proxy that speaks to it: its key is the config's
        remedy = "Give a key: set worker_api_key, or PPD_WORKER_API_KEY, to the engine's --api-key."
        yield Finding(Level.FAIL, check, f"{who} wants a key, or another one", remedy)
    elif fact.state == "down" or (not fact.state and not fact.reachable):
        remedy = "Start the engine, or correct its address; a firewall between the proxy and it looks the same."
        yield Finding(Level.FAIL, check, f"{who} is not reachable{why}", remedy)
    elif not fact.reachable:
        remedy = "Run the doctor where the engines can be reached, to see what their metrics say."
        yield Finding(Level.WARN, check, f"{who} does not answer here, though the proxy calls it {fact.state}", remedy)
    elif not fact.healthy:
        remedy = "Read the end of the engine's log: it answers, but its /health does not say 200, so it starts or died."
        yield Finding(Level.FAIL, check, f"{who} is not healthy{why}", remedy)
    elif fact.state == "draining":
        remedy = f'If nobody is stopping it: PATCH /admin/workers/{fact.name} with {{"draining": false}}.'
        yield Finding(Level.WARN, check, f"{who} is draining and takes no new turns", remedy)


def ways_to_serve(facts: Facts) -> Iterator[Finding]:
    check = "ways to serve"
    if not facts.workers:
        return
    prefills, decodes = facts.serving(Role.PREFILL), facts.serving(Role.DECODE)
    replicas = facts.serving(Role.REPLICA)
    split = any(can_pair(p.worker, d.worker) for p in prefills for d in decodes)
    alone = any(answers_alone(fact.worker) for fact in decodes)
    standing_in = [fact for fact in prefills if facts.prefills_answer and takes_either_leg(fact.worker)]
    kinds = ("SPLIT", split), ("LOCAL", alone), ("REPLICA", replicas or standing_in)
    ways = [way for way, is_there in kinds if is_there]
    can = f"turns can be {', '.join(ways)}"
    if not ways:
        yield Finding(Level.FAIL, check, "no worker can answer", "Start a P and a D that can pair, or an R.")
    elif prefills and decodes and not split:
        remedy = "Give each P a D of the same connector, engine, version and model."
        yield Finding(Level.FAIL, check, f"no P can hand over to any D; {can}", remedy)
    elif decodes and not prefills:
        remedy = "Start a P, or leave it so if D is meant to compute every prompt."
        yield Finding(Level.WARN, check, f"there is no P; {can}", remedy)
    elif prefills and not decodes and standing_in:
        yield Finding(Level.WARN, check, f"there is no D, so P answer in its place; {can}", "Start a D.")
    elif prefills and not decodes:
        yield Finding(Level.WARN, check, f"P serves nobody without a D; {can}", "Start a D, or stop the P.")
    else:
        yield Finding(Level.OK, check, can)
    if facts.mode == Mode.REPLICA and not replicas:
        remedy = "Start an R, or choose another mode."
        yield Finding(Level.WARN, check, "the mode is replica, but there is no R: turns go to D", remedy)


def versions_agree(facts: Facts) -> Iterator[Finding]:
    remedy = "Run one version of the engine on P and D, or during an upgrade at least a P and a D of each version."
    yield from _agreement("versions", facts, lambda fact: fact.worker.engine_version, remedy)


def connectors_agree(facts: Facts) -> Iterator[Finding]:
    remedy = "Start P and D with the same connector, in the same mode, and announce it by that name."
    yield from _agreement("connectors", facts, lambda fact: fact.worker.connector, remedy)


def _agreement(check: str, facts: Facts, value_of: Callable[[WorkerFact], str], remedy: str) -> Iterator[Finding]:
    """KV moves only between a P and a D with the same value.

    1. An unknown value can't be compared.  2. One value on all: fine.  3. Several, each on both sides: the proxy pairs
    workers of the same value.  4. A value on one side only: its workers can't be paired.
    """
    prefills, decodes = _of(facts, Role.PREFILL), _of(facts, Role.DECODE)
    if not prefills or not decodes:
        return
    shown = ", ".join(f"{fact.name} {value_of(fact) or 'unknown'}" for fact in (*prefills, *decodes))
    left, right = ({value_of(fact) for fact in side} for side in (prefills, decodes))
    known = (left | right) - {""}
    if not known:
        yield Finding(Level.SKIP, check, f"not known: {shown}", remedies.versions(prefills[0].worker.engine))
    elif len(known) == 1 and "" in left | right:
        untold = next(fact for fact in (*prefills, *decodes) if not value_of(fact))
        yield Finding(Level.WARN, check, f"not all are known: {shown}", remedies.versions(untold.worker.engine))
    elif len(known) == 1:
        yield Finding(Level.OK, check, f"P and D agree: {known.pop()}")
    elif left == right:
        yield Finding(Level.WARN, check, f"mixed, and paired like with like: {shown}", remedy)
    else:
        yield Finding(Level.FAIL, check, f"P and D differ: {shown}", remedy)


def connectors_are_known(facts: Facts) -> Iterator[Finding]:
    check = "connectors"
    for fact in _of(facts, Role.PREFILL, Role.DECODE):
        worker = fact.worker
        if missing := missing_coordinates(worker):
            said = f"{fact.name} takes no part in a SPLIT: it does not tell its {', '.join(missing)}"
            yield Finding(Level.FAIL, check, said, remedies.unknown(worker, missing[0]))
        if worker.connector not in CONNECTORS:
            remedy = f"The proxy speaks {', '.join(CONNECTORS)}."
            yield Finding(Level.FAIL, check, f"{fact.name} uses {worker.connector!r}, which is not known", remedy)
        elif worker.connector == "p2p_nccl" and (engine_version(worker.engine_version) or (0, 0)) >= P2P_NCCL_ENDED:
            said = f"{fact.name} runs vLLM {worker.engine_version}, which has no p2p_nccl any more"
            yield Finding(Level.FAIL, check, said, "Use nixl.")


def decodes_compute_prompts(facts: Facts) -> Iterator[Finding]:
    """Of a P2pNccl D nobody can be asked: its pings do not tell, and a request that it cannot take would stop it."""
    for fact in _of(facts, Role.DECODE):
        if fact.worker.connector == "p2p_nccl" and not answers_alone(fact.worker):
            said = f"{fact.name} gets no LOCAL turns: vLLM's own P2pNccl waits for KV of each request"
            remedy = "If it is patched to compute a request whose X-Request-Id has no addresses, say takes_plain=true."
            yield Finding(Level.WARN, "LOCAL turns", said, remedy)


def models_are_shared(facts: Facts) -> Iterator[Finding]:
    check = "models"
    if not facts.workers:
        return
    unknown = [fact for fact in facts.workers if not fact.worker.models]
    prefills, decodes = _of(facts, Role.PREFILL), _of(facts, Role.DECODE)
    if unknown:
        yield Finding(Level.SKIP, check, f"not known of {_names(unknown)}")
    if any(fact in unknown for fact in (*prefills, *decodes)):
        return
    on_p, on_d = _models(prefills), _models(decodes)
    troubles = []
    if prefills and decodes and not on_p & on_d:
        remedy = "Start P and D with the same model and the same --served-model-name."
        troubles.append(
            Finding(Level.FAIL, check, f"P serves {', '.join(sorted(on_p))}, D {', '.join(sorted(on_d))}", remedy)
        )
    elif prefills and decodes and on_p != on_d:
        remedy = "Serve it on both, or leave it if its turns need no handoff."
        troubles += [
            Finding(Level.WARN, check, f"{model} is on {'P' if model in on_p else 'D'} only", remedy)
            for model in sorted(on_p ^ on_d)
        ]
    if not troubles and len(unknown) < len(facts.workers):
        troubles.append(Finding(Level.OK, check, f"served: {', '.join(sorted(_models(facts.workers)))}"))
    yield from troubles


def prefix_caching_is_on(facts: Facts) -> Iterator[Finding]:
    """According to the engines' metrics; the probe conversation shows whether it works."""
    check = "prefix caching"
    if not facts.workers:
        return
    computing = [fact for fact in facts.workers if fact.role is not Role.ENCODE]
    off = [fact for fact in computing if fact.prefix_caching is False]
    told = [fact for fact in computing if fact.prefix_caching is not None]
    for fact in off:
        level, said = Level.WARN if fact.role is Role.PREFILL else Level.FAIL, f"off on {fact.name}"
        remedy = remedies.caching(fact.worker.engine)
        yield Finding(level, check, f"{said}: every turn computes the whole context again", remedy)
    if not told:
        yield Finding(Level.SKIP, check, "the metrics do not tell; only a conversation can show it")
    elif not off:
        yield Finding(Level.OK, check, f"on, say the metrics of {_names(told)}")


def decodes_keep_prefixes(facts: Facts) -> Iterator[Finding]:
    """Of engines other than vLLM, whose D may keep nothing for the next turn."""
    check = "prefixes on D"
    for fact in _of(facts, Role.DECODE):
        if fact.worker.engine == "sglang" and not fact.worker.keeps_prefixes:
            said = f"{fact.name} has no radix cache: each turn moves the whole context to it"
            yield Finding(Level.WARN, check, said, "Start it with --disaggregation-decode-enable-radix-cache.")
        elif fact.worker.engine == "trtllm" and not fact.worker.keeps_prefixes:
            said = f"{fact.name} reuses no blocks: a LOCAL turn there computes the whole context, which is no gain"
            remedy = "Start it with enable_block_reuse: true in its kv_cache_config, and take prefix_cache=false away."
            yield Finding(Level.WARN, check, said, remedy)
        elif fact.worker.engine == "trtllm" and PREFIX_CACHE not in fact.worker.coordinates:
            said = f"{fact.name} does not tell whether it reuses blocks; if not, a LOCAL turn there is no gain"
            remedy = "See that its kv_cache_config has enable_block_reuse: true; else say prefix_cache=false."
            yield Finding(Level.SKIP, check, said, remedy)


def encoders_have_consumers(facts: Facts) -> Iterator[Finding]:
    """Embeddings are of a model, and only engines of one version are known to make the same ones.

    No E is asked for engines whose requests cannot say what it told.
    """
    check = "encoders"
    all_others = [fact for fact in facts.workers if fact.role is not Role.ENCODE]
    others = [fact for fact in all_others if takes_embeddings(fact.worker)]
    for fact in _of(facts, Role.ENCODE):
        if all_others and not others:
            engines = " and ".join(sorted({other.worker.engine for other in all_others}))
            said = f"{fact.name} is never asked: P, D and R run {engines}, which take no embeddings of an E"
            yield Finding(Level.WARN, check, said, "Stop it, or start P, D or R of vLLM.")
            continue
        models, version = set(fact.worker.models), fact.worker.engine_version
        if models and all(other.worker.models for other in others) and not models & _models(others):
            said = f"{fact.name} serves {', '.join(sorted(models))}, which no other worker does"
            yield Finding(Level.FAIL, check, said, "Start it with the model and the --served-model-name of P, D and R.")
        elif strange := {other.worker.engine_version for other in others} - {version, ""}:
            said = f"{fact.name} runs {version or 'an unknown version'}, others {', '.join(sorted(strange))}"
            yield Finding(Level.WARN, check, said, "Run one version, as engines load each other's embeddings.")
        else:
            yield Finding(Level.OK, check, f"{fact.name} encodes for {_names(others)}")


def encoders_encode(facts: Facts) -> Iterator[Finding]:
    check = "encoding"
    for one in facts.encodings:
        if one.status == 200:
            told = "says where the embedding is" if one.tells else "does not say where the embedding is, as by files"
            yield Finding(Level.OK, check, f"{one.worker} encoded an image in {one.seconds:.2f} s, and {told}")
        elif one.status in (401, 403):
            yield Finding(Level.SKIP, check, f"{one.worker} wants a key, which only the proxy has")
        else:
            why = one.error or f"it answered {one.status}"
            level = Level.WARN if 400 <= one.status < 500 else Level.FAIL  # its model may take no images
            remedy = "Read the end of its log. It must be an E of a model that takes images, sounds or videos."
            yield Finding(level, check, f"{one.worker} did not encode a small image: {why}", remedy)


def _of(facts: Facts, *roles: Role) -> tuple[WorkerFact, ...]:
    return tuple(fact for fact in facts.workers if fact.role in roles)


def _models(workers: Iterable[WorkerFact]) -> set[str]:
    return {model for fact in workers for model in fact.worker.models}


def _names(workers: Iterable[WorkerFact]) -> str:
    return ", ".join(fact.name for fact in workers)
