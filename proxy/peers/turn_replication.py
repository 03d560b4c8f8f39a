"""What turns change and teach, sent to the other processes and applied as they send it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Generic, ParamSpec, Protocol

from ..beliefs.held import CacheFound, LegOutcome, SentLeg
from ..encoders.encoder_chooser import ItemsToEncode
from ..encoders.records import Embeddings
from ..fleet.worker import WorkerId
from ..laws.forecasts import AnswerEnded, SessionReturned
from ..laws.worker_laws import LawsNews
from ..routing.state import State
from ..sessions.rendered_replies import Case
from ..sessions.session import Session
from ..sessions.templates import NewHeads
from ..sessions.text_kinds import Amounts
from .channels import Member
from .events import (
    AnyEvent,
    Appliers,
    BookLearned,
    EmbeddingsHeld,
    EncodingCounted,
    EstimatesLearned,
    HabitsLearned,
    HeadsComputed,
    LawsLearned,
    LawsTold,
    LegsUnderWay,
    RepliesLearned,
    SessionDropped,
    SessionLearned,
    TemplateLearned,
    TokensCounted,
    TurnsCounted,
    UseChanged,
)

BATCH_SESSIONS = 200  # of a snapshot
FIRST_SESSIONS = 5_000  # of a larger snapshot
_NO_TURNS = TurnsCounted(0, 0)
P = ParamSpec("P")


class EventSender(Protocol):
    """See `Channels`."""

    def queue(self, event: AnyEvent) -> None: ...
    def flush(self) -> None: ...
    def flushed(self) -> Awaitable[None]: ...
    def schedule_flush(self) -> None: ...
    def drain(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Copies(Generic[P]):
    """A `Replicated`: `catch_up` drains the channels, `changed` sends."""

    catch_up: Callable[[], None]
    changed: Callable[P, None]


@dataclass(frozen=True, slots=True)
class CopiesAtOnce(Copies[P]):
    """A `ReplicatedAtOnce`."""

    tell: Callable[[], None]
    told: Callable[[], Awaitable[None]]


class TurnReplication:
    """`leg_limit`: legs that one worker may have."""

    _channels: EventSender  # set by `attach`; nothing is sent before

    def __init__(self, member: Member, state: State, leg_limit: Callable[[], int]) -> None:
        self._member = member
        self._state = state
        self._uses = state.registry.uses
        self._leg_limit = leg_limit
        # Since they were sent:
        self._used: set[WorkerId] = set()  # workers whose use has changed
        self._counts_changed = False
        self._arrived = self._conversations = 0
        self._is_due = False  # a flush is to come

        self._elsewhere: dict[int, TurnsCounted] = {}  # by process

    def attach(self, channels: EventSender) -> None:
        self._channels, state, catch_up = channels, self._state, channels.drain
        state.sessions.replicated = CopiesAtOnce(catch_up, self._session_learned, channels.flush, channels.flushed)
        state.beliefs.replicated = Copies(catch_up, channels.queue)
        state.tokens.replicated = Copies(catch_up, self._tokens_counted)
        state.templates.replicated = Copies(catch_up, self._heads_computed)
        state.sessions.rendered.replicated = Copies(catch_up, self._replies_learned)
        state.laws.replicated = Copies(catch_up, self._laws_told)
        state.forecasts.replicated = Copies(catch_up, channels.queue)
        state.registry.uses.replicated = Copies(catch_up, self._use_changed)
        state.arrivals.replicated = Copies(catch_up, self._turn_arrived)
        state.admission.replicated = Copies(catch_up, self._admission_changed)
        state.encoders.replicated = Copies(catch_up, self._media_encoded)

    # -- sending

    def _use_changed(self, worker: WorkerId, has_other_legs: bool) -> None:
        self._used.add(worker)
        if has_other_legs and 2 * self._uses.inflight(worker) >= self._leg_limit():
            self._channels.flush()  # so little room is left that all processes should know of each leg
        elif not self._is_due:
            self._schedule()

    def _session_learned(self, session: Session, label: int | None, keys: Iterable[int], has_prefilled: bool) -> None:
        self._channels.queue(SessionLearned(session, label, list(keys), has_prefilled))

    def _tokens_counted(self, model: str, added: Amounts, new_tokens: int, completion: int | None) -> None:
        self._channels.queue(TokensCounted(model, added, new_tokens, completion))

    def _heads_computed(self, new: NewHeads) -> None:
        self._channels.queue(HeadsComputed(new))

    def _replies_learned(self, case: Case, score: int) -> None:
        self._channels.queue(RepliesLearned(case, score))

    def _laws_told(self, news: LawsNews) -> None:
        self._channels.queue(LawsTold(news))

    def _media_encoded(self, news: Embeddings | ItemsToEncode) -> None:
        self._channels.queue(EmbeddingsHeld(news) if isinstance(news, Embeddings) else EncodingCounted(news))

    def _turn_arrived(self, opens: bool) -> None:
        self._arrived += 1
        self._conversations += opens
        self._counts_changed = True
        if not self._is_due:
            self._schedule()

    def _admission_changed(self) -> None:
        self._counts_changed = True
        if self._state.admission.is_tight:
            self._channels.flush()
        elif not self._is_due:
            self._schedule()

    def _schedule(self) -> None:
        self._channels.schedule_flush()
        self._is_due = True

    def pending(self) -> list[AnyEvent]:
        """What changes at every turn: sent as it is at a flush, not step by step. To be encoded at once."""
        self._is_due = False
        events: list[AnyEvent] = []
        while self._used:
            use = self._uses.own.get(worker := self._used.pop())
            if use is not None:
                events.append(UseChanged(self._member.index, worker, use))
        if self._counts_changed:
            admission = self._state.admission
            events.append(TurnsCounted(admission.inside, admission.waiting, self._arrived, self._conversations))
            self._counts_changed, self._arrived, self._conversations = False, 0, 0
        return events

    def own(self) -> list[AnyEvent]:
        """What this process runs, for one that has just started. To be encoded at once."""
        registry, index, admission = self._state.registry, self._member.index, self._state.admission
        uses = [(view.id, registry.use(view.id)) for view in registry.views()]
        return [
            TurnsCounted(admission.inside, admission.waiting),
            *(UseChanged(index, worker, use) for worker, use in uses if use is not None),
            LegsUnderWay(self._state.beliefs.legs()),
            *map(EncodingCounted, self._state.encoders.to_encode()),
        ]

    def snapshot(self) -> Iterator[list[AnyEvent]]:
        """All that this process knows, in batches; what changes between two of them is sent as a change."""
        state = self._state
        yield [EstimatesLearned(estimates) for estimates in state.tokens.estimates()]
        yield [BookLearned(lessons) for lessons in state.beliefs.lessons()]
        yield [HeadsComputed(new) for new in state.templates.heads()]
        yield [TemplateLearned(model, score) for model, score in state.templates.scores()]
        yield [RepliesLearned(case, score) for case, score in state.sessions.rendered.scores()]
        yield [LawsLearned(state.laws.lessons())]
        yield [HabitsLearned(habits) for habits in state.forecasts.habits()]
        for found in state.encoders.embeddings():  # a thousand items each
            yield [EmbeddingsHeld(found)]
        yield [UseChanged(process, worker, use) for process, worker, use in state.registry.others()]
        sessions = self._sessions_to_send()
        while batch := list(islice(sessions, BATCH_SESSIONS)):
            yield [SessionLearned(session, *state.sessions.lookup_keys(session)) for session in batch]

    def _sessions_to_send(self) -> Iterator[Session]:
        """The newest first, as the next turns are likely theirs; then all, in the order in which they expire."""
        every = self._state.sessions.all()
        if len(every) > FIRST_SESSIONS:
            yield from every[-FIRST_SESSIONS:]
        yield from every
        sent_s = every[-1].seen_s if every else 0.0
        used = takewhile(lambda session: session.seen_s > sent_s, reversed(self._state.sessions.all()))
        yield from reversed(list(used))  # meanwhile: the older ones that were sent after them stand behind them

    # -- applying

    def restarted(self, process: int) -> None:
        """Its predecessor's turns are gone."""
        self._count_elsewhere(process, _NO_TURNS)
        self._state.registry.ended(process)
        self._state.beliefs.adopt_legs((), process)
        self._state.encoders.forget(process)

    def appliers(self) -> Appliers:
        state, now, beliefs = self._state, self._state.now, self._state.beliefs
        return {
            UseChanged: self._apply_use,
            SessionLearned: lambda _, event: state.sessions.adopt(
                event.session, event.label, event.keys, has_prefilled=event.has_prefilled
            ),
            SessionDropped: lambda _, event: state.sessions.drop(event.session_id),
            SentLeg: lambda sender, leg: beliefs.sent(leg, sender),
            LegOutcome: lambda sender, end: beliefs.ended_leg(end, sender),
            LegsUnderWay: lambda sender, event: beliefs.adopt_legs(event.legs, sender),
            CacheFound: lambda sender, found: beliefs.found(found, sender),
            BookLearned: lambda _, event: beliefs.adopt_lessons(event.lessons),
            TokensCounted: lambda _, event: state.tokens.take(
                event.model, event.added, event.new_tokens, event.completion_tokens
            ),
            EstimatesLearned: lambda _, event: state.tokens.adopt(event.estimates),
            HeadsComputed: lambda _, event: state.templates.take(event.new),
            TemplateLearned: lambda _, event: state.templates.adopt(event.model, event.score),
            RepliesLearned: lambda _, event: state.sessions.rendered.adopt(event.case, event.score),
            LawsTold: lambda _, event: state.laws.take(event.news, now()),
            LawsLearned: lambda _, event: state.laws.adopt(event.lessons, now()),
            AnswerEnded: lambda _, habit: state.forecasts.take(habit),
            SessionReturned: lambda _, habit: state.forecasts.take(habit),
            HabitsLearned: lambda _, event: state.forecasts.adopt(event.habits),
            EmbeddingsHeld: lambda _, event: state.encoders.take(event.found),
            EncodingCounted: lambda sender, event: state.encoders.count_elsewhere(sender, event.count),
            TurnsCounted: self._count_elsewhere,
        }

    def _count_elsewhere(self, process: int, turns: TurnsCounted) -> None:
        admission, before = self._state.admission, self._elsewhere.get(process, _NO_TURNS)
        self._elsewhere[process] = turns
        admission.inside_elsewhere += turns.inside - before.inside
        admission.waiting_elsewhere += turns.waiting - before.waiting
        if turns.arrived:
            self._state.arrivals.adopt(self._state.now(), turns=turns.arrived, conversations=turns.conversations)

    def _apply_use(self, _: int, event: UseChanged) -> None:
        if event.by != self._member.index:  # a snapshot holds what a predecessor of this process did
            self._state.registry.used_by(event.by, event.worker, event.use)
