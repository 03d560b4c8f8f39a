"""Who may take a turn: the workers that serve its model, less those that are full, or that failed it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import chain

import msgspec
from msgspec.structs import replace

from ..config import Mode, StageOrder
from ..connectors import (
    UNSPLIT,
    answers_alone,
    can_pair,
    missing_coordinates,
    reads_back,
    splits,
    takes_either_leg,
)
from ..errors import AllBusy, AllDown, NoWorkerError
from ..fleet.order import full_workers, includes, pairing_kinds, without
from ..fleet.places import UNKNOWN
from ..fleet.view import Fleet, WorkerView, check_model
from ..fleet.worker import PairId, Role, WorkerId
from ..openai.request import Endpoint
from .decision import Rules, Turn
from .placement import SlowStart, most_of, own_worker, pick_decode, pick_prefill

_PREFILL, _DECODE, _REPLICA = Role.PREFILL, Role.DECODE, Role.REPLICA  # looking up enum members by name is slow

Excluded = Collection[WorkerId | PairId]
"""Workers, and pairs of a P and a D, that are not to be used."""


class Candidates(msgspec.Struct, frozen=True, gc=False):
    """The workers that may take this turn, by role, and which pairs of them cannot hand over now."""

    prefills: Sequence[WorkerView]
    decodes: Sequence[WorkerView]
    replicas: Sequence[WorkerView]
    full: Collection[WorkerId]
    excluded: Excluded
    known: WorkerView | None  # the D for LOCAL: see `_known`; whether or not it may take this turn
    qps: float
    now_s: float
    slow_start: SlowStart
    worker_limit: float = math.inf  # legs at once
    down: Sequence[WorkerView] = ()  # D and R that would take turns if they were up
    order: StageOrder = StageOrder.MODE
    first: WorkerView | None = None  # the D that is chosen already, where it comes first
    is_unsplit: bool = False  # there are P, and none whose connector could split a turn of this endpoint

    def prefills_for(self, decode: WorkerView) -> Sequence[WorkerView]:
        """The P that can hand over to this D."""
        if self._bars_pairs():
            return [view for view in self.prefills if self.can_hand_over(view, decode)]
        kinds = pairing_kinds(self.prefills)
        if kinds is not None and all(can_pair(kind, decode.worker) for kind in kinds):
            return self.prefills
        return [view for view in self.prefills if can_pair(view.worker, decode.worker)]

    def decode_for(self, turn: Turn) -> WorkerView | None:
        """To which a P would hand over.

        With several versions or connectors in the fleet, a D to which some P can is preferred.
        """
        return self.first or pick_decode(turn, self.pairable() or self.decodes, self.slow_start)

    def feeding(self, views: Sequence[WorkerView]) -> Sequence[WorkerView]:
        """The P that can hand over to one of these."""
        able = [each for each in self.prefills if any(self.can_hand_over(each, view) for view in views)]
        return self.prefills if len(able) == len(self.prefills) else able

    def pairable(self) -> Sequence[WorkerView]:
        """The D to which some P can hand over."""
        if self._bars_pairs():
            return [view for view in self.decodes if any(self.can_hand_over(each, view) for each in self.prefills)]
        kinds, theirs = pairing_kinds(self.prefills), pairing_kinds(self.decodes)
        if kinds is None:
            kinds = [view.worker for view in self.prefills]
        if theirs is not None and all(any(can_pair(each, their) for each in kinds) for their in theirs):
            return self.decodes
        if not kinds:
            return []
        first, rest = kinds[0], kinds[1:]  # nearly always the first can
        return [
            view
            for view in self.decodes
            if can_pair(first, view.worker) or any(can_pair(each, view.worker) for each in rest)
        ]

    def _bars_pairs(self) -> bool:
        return bool(self.excluded) and any(isinstance(key, tuple) for key in self.excluded)

    def can_hand_over(self, prefill: WorkerView, decode: WorkerView) -> bool:
        if self.excluded and (prefill.id, decode.id) in self.excluded:
            return False
        return can_pair(prefill.worker, decode.worker)

    def why_unpaired(self, decode: WorkerView) -> str:
        """The veto where no P can hand over to this D."""
        if self.is_unsplit:
            return "endpoint_not_split"
        known = decode.worker
        alike = [view.worker for view in self.prefills if view.worker.connector == known.connector]
        untold = alike and (missing_coordinates(known) or any(map(missing_coordinates, alike)))
        return "missing_coordinates" if untold else "no_prefill_worker"

    def readers(self, decode: WorkerView) -> Sequence[WorkerView]:
        """The P that can read KV back from this D, and hand over to it; in most fleets none."""
        if not reads_back(decode.worker) or decode.worker.has_sidecar:
            return ()
        able = self.prefills_for(decode)
        kinds = pairing_kinds(able)
        if kinds is not None and all(map(reads_back, kinds)):
            return able
        return [view for view in able if reads_back(view.worker)]

    def prefills_answer(self, turn: Turn) -> bool:
        """Whether a P may answer this turn alone, as an R does.

        None a turn of `/v1/responses`, as a later one that names it would be sent to a D. None where D have sidecars:
        there the one before the worker that answers sees to its turns.
        """
        return not turn.is_response and not any(view.worker.has_sidecar for view in self.decodes)

    def can_answer(self, prefill: WorkerView) -> bool:
        """Whether this P has a place free for a turn of its own, and an engine that can take one."""
        return _can_do_either(prefill, self.excluded, self.worker_limit)

    def can_lend(self, view: WorkerView) -> bool:
        """Whether this D or R may compute a prompt for another one."""
        return view.role is not _PREFILL and _can_do_either(view, self.excluded, self.worker_limit)


def has_room(
    fleet: Fleet, rules: Rules, blocked: Callable[[], Excluded] = lambda: (), *, is_response: bool = False
) -> bool:
    """Whether a turn that arrives now finds a worker with room; True also if no worker could ever take it.

    It needs no P: if all are full or hang, D computes the prompt. blocked: asked only where no D or R has room.
    """
    limit = rules.worker_limit or math.inf
    for view in chain(fleet.decodes, fleet.replicas):  # nearly always the first one has
        if not view.is_full(limit):
            return True
    excluded = blocked()
    if not is_response and _stand_ins(fleet, rules, fleet.prefills, excluded):
        return True
    if fleet.decodes or fleet.replicas:
        return False
    return not fleet.down or any(_may_try(view, excluded) for view in fleet.down)


def _stand_ins(
    fleet: Fleet, rules: Rules, prefills: Sequence[WorkerView], excluded: Excluded = ()
) -> Sequence[WorkerView]:
    """The P of these that answer in place of D and R, where all of those are full or down; most operators want none.

    In mode `profiles` the profiles say who answers. No P learns how many places it has, so it has as many as the D or R
    with the most: else each turn would go to the P as soon as others are full.
    """
    if not rules.prefills_answer or rules.mode is Mode.PROFILES:
        return ()
    if any(view.worker.has_sidecar for view in chain(fleet.decodes, fleet.down)):
        return ()
    limit = rules.worker_limit or math.inf
    places = max((view.places for view in chain(fleet.decodes, fleet.replicas)), default=UNKNOWN)
    if places != UNKNOWN and places < limit:
        limit = places
    return [view for view in prefills if _can_do_either(view, excluded, limit)]


def _can_do_either(view: WorkerView, excluded: Excluded, limit: float) -> bool:
    """Whether this worker may also do what is not its role's."""
    may = view.id not in excluded and not view.is_full(limit) and not view.worker.has_sidecar
    return may and takes_either_leg(view.worker)


def _may_try(view: WorkerView, excluded: Excluded) -> bool:
    """Whether one turn may find out if a worker that is down by its probes answers turns all the same."""
    return view.unanswered and not view.inflight and view.id not in excluded


def find_candidates(
    turn: Turn, fleet: Fleet, rules: Rules, *, qps: float, now_s: float, avoid: Excluded, blocked: Excluded
) -> Candidates:
    """`avoid` failed this very turn, `blocked` other turns. Raises as `decide` does."""
    slow_start = SlowStart.in_fleet(fleet, now_s, rules.warm_up_s)
    prefills, decodes, replicas = fleet.prefills, fleet.decodes, fleet.replicas
    full: Collection[WorkerId] = ()
    limit = rules.worker_limit or math.inf
    busy_prefills = full_workers(prefills, limit) if rules.worker_limit else []  # else a P has places for all
    busy = full_workers(decodes, limit), full_workers(replicas, limit), busy_prefills
    if blocked and _needs_prefill(fleet):  # nobody can do without a P: those that failed others are all there are
        blocked = {key for key in blocked if any(key == view.id for view in decodes)}
    if avoid or blocked or any(busy):
        own = own_worker(turn, decodes, replicas)
        # To wait inside the session's own engine costs less than to compute the prefix elsewhere.
        spared = (own.id,) if own is not None and own.inflight < limit else ()
        prefills, decodes, replicas, full = _narrowed(fleet, busy, avoid, blocked, spared)
    if not prefills and _needs_prefill(fleet):
        if busy[2]:
            raise AllBusy(f"every P that serves model {turn.model!r} is busy")
        missed = (view for view in fleet.views.values() if view.role is _PREFILL and view.is_missed(turn.model))
        if not fleet.prefills and next(missed, None) is not None:
            raise AllDown(f"every P that serves model {turn.model!r} is down")
    able = _splitting(prefills, turn.endpoint) if UNSPLIT[turn.endpoint] else prefills
    # None answers a Response, which a later turn may name, and be sent to a D.
    if not (decodes or replicas or turn.is_response) and (replicas := _stand_ins(fleet, rules, prefills)):
        able = prefills = ()
    if not decodes and not replicas:
        if full:
            raise AllBusy(f"every worker that serves model {turn.model!r} is busy")
        decodes, replicas = _on_trial(turn, fleet, avoid, blocked)
    # What is held by no turns of its own is where it would go in any case.
    goes_anywhere = turn.held and decodes and not (turn.held_tokens or turn.stored_response)
    known = pick_decode(turn, decodes, slow_start) if goes_anywhere else _known(turn, fleet)
    excluded = frozenset((*avoid, *blocked)) if avoid else blocked
    return Candidates(
        able,
        decodes,
        replicas,
        full,
        excluded,
        known,
        qps,
        now_s,
        slow_start,
        limit,
        down=fleet.down,
        is_unsplit=len(prefills) > len(able) == 0,
    )


def _splitting(prefills: Sequence[WorkerView], endpoint: Endpoint) -> Sequence[WorkerView]:
    """The P whose connectors can split a turn of this endpoint."""
    kinds = pairing_kinds(prefills)
    if kinds is not None and all(splits(kind, endpoint) for kind in kinds):
        return prefills
    return [view for view in prefills if splits(view.worker, endpoint)]


def in_order(turn: Turn, candidates: Candidates, rules: Rules, order: StageOrder) -> Candidates:
    """Once that worker is chosen which comes first: of P that one is left, and of D it is the one that is judged.

    A turn that one engine has to do alone needs no pair.
    """
    if turn.stored_response or turn.single_engine is not None:
        return replace(candidates, order=order)
    if order is StageOrder.PREFILL_FIRST:
        prefill = pick_prefill(turn, _feeding(candidates, rules), candidates.slow_start)
        return replace(candidates, order=order, prefills=candidates.prefills if prefill is None else [prefill])
    first, known = _first_decode(turn, candidates), candidates.known
    # One that may take no turn stays, so that the reason tells what stands against it.
    is_able = known is not None and includes(candidates.decodes, known.id)
    return replace(candidates, order=order, first=first, known=first if is_able else known)


def _feeding(candidates: Candidates, rules: Rules) -> Sequence[WorkerView]:
    able = candidates.feeding(candidates.decodes)
    if able or not rules.moves_kv:
        return able
    return candidates.feeding([view for view in candidates.replicas if takes_either_leg(view.worker)])


def _first_decode(turn: Turn, candidates: Candidates) -> WorkerView | None:
    """The session's own, if it can take a turn in any way; else one to which a P can hand over."""
    paired = candidates.pairable()
    able = paired or [view for view in candidates.decodes if answers_alone(view.worker)] or candidates.decodes
    own = own_worker(turn, candidates.decodes)
    if own is not None and (answers_alone(own.worker) or includes(paired, own.id)):
        return own
    return pick_decode(turn, able, candidates.slow_start)


def _on_trial(
    turn: Turn, fleet: Fleet, avoid: Excluded, blocked: Excluded
) -> tuple[Sequence[WorkerView], Sequence[WorkerView]]:
    """D and R that are down, and may be asked all the same; where there is none, the error says why."""
    trial = [view for view in fleet.down if _may_try(view, blocked) and view.id not in avoid]
    if trial:
        return [view for view in trial if view.role is _DECODE], [view for view in trial if view.role is _REPLICA]
    if fleet.down:
        raise AllDown(f"every worker that serves model {turn.model!r} is down")
    check_model(turn.model, fleet.views.values())
    raise NoWorkerError(f"no decode or replica worker can serve model {turn.model!r} now")


def _needs_prefill(fleet: Fleet) -> bool:
    """Whether every turn does: no R is there, and no D computes a prompt itself."""
    if fleet.replicas or not fleet.decodes:
        return False
    return not any(answers_alone(view.worker) for view in fleet.decodes)


def _narrowed(
    fleet: Fleet,
    busy: Sequence[Sequence[WorkerView]],
    avoid: Excluded,
    blocked: Excluded,
    spared: Collection[WorkerId],
) -> tuple[Sequence[WorkerView], Sequence[WorkerView], Sequence[WorkerView], Collection[WorkerId]]:
    """P, D and R that may be asked, and those D and R that only lack room.

    busy: the D, the R and the P that are full; spared: of these D and R who may be asked all the same.
    """
    avoided = {key for key in avoid if isinstance(key, str)}
    passed_over = {key for key in blocked if isinstance(key, str)}
    # A turn can do without a P, so a P that failed other turns, or is full, is not asked at all.
    prefills = without(fleet.prefills, avoided | passed_over | {view.id for view in busy[2]})
    full = {view.id for view in (*busy[0], *busy[1])}.difference(avoided, spared)
    unable = avoided | full
    decodes, replicas = without(fleet.decodes, unable), without(fleet.replicas, unable)
    # A D or R that failed other turns is asked only if there is no other.
    if passed_over:
        well = without(decodes, passed_over), without(replicas, passed_over)
        if any(well):
            decodes, replicas = well
    return prefills, decodes, replicas, full


def _known(turn: Turn, fleet: Fleet) -> WorkerView | None:
    """Where LOCAL would run: the D that holds most of the session; without one, the session's last worker."""
    last = None if turn.decode is None else fleet.views.get(turn.decode)
    if turn.stored_response or not turn.held:
        return last
    best, most, prompt, own = last, 0, turn.prompt_tokens, turn.decode
    for worker, held in turn.held.items():
        tokens = held.tokens if held.tokens < prompt else prompt
        if tokens > most or (tokens == most and worker == own):
            view = fleet.views.get(worker)
            if view is not None and view.worker.role is _DECODE:
                best, most = view, tokens
    if best is last or not (turn.held_tokens and turn.decode):
        return best
    return best if most >= most_of(turn) else last
