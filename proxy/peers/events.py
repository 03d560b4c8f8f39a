"""What the processes of one proxy send each other.

Most events give a state as it is now, so the newest one holds. The others say what one turn taught, or where it is: all
processes take that by the same functions as the one whose turn it is. Should such an event be taken twice, as by a
process that has just got a snapshot, then it changes little; should it be lost, the answers that follow teach it again.

A packet is a msgpack list of events, each an array that begins with its tag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..beliefs.held import BookLessons, CacheFound, LegOutcome, SentLeg
from ..encoders.encoder_chooser import ItemsToEncode
from ..encoders.records import Embeddings
from ..fleet.ledger import Use
from ..fleet.view import WorkerView
from ..fleet.worker import WorkerId
from ..health.circuit_breaker import Circuit
from ..health.strangers import Meeting
from ..laws.forecasts import AnswerEnded, ModelHabits, SessionReturned
from ..laws.worker_laws import LawsLessons, LawsReset, TurnTimes
from ..sessions.prefix_chain import PrefixEnd
from ..sessions.rendered_replies import Case
from ..sessions.session import Session
from ..sessions.templates import NewHeads
from ..sessions.text_kinds import Amounts
from ..sessions.token_estimates import Estimates


class Event(msgspec.Struct, array_like=True, gc=False):
    """The base of all events but those that are values of another room: what turns tell of caches, and habits."""


class Joined(Event, tag="joined"):
    """The sender has just started, perhaps as a successor: it knows nothing and runs nothing."""

    life: int  # random: no predecessor has the same


class JoinReply(Event, tag="reply"):
    """Each process's answer to `Joined`, after what it runs itself."""

    life: int  # the joining process's
    has_state: bool  # and can send a snapshot; False: it has just started too


class SnapshotRequest(Event, tag="snapshot"):
    """Asks for all that the receiver knows."""

    life: int


class SnapshotEnd(Event, tag="end"):
    """The snapshot is complete; changes go on coming by themselves."""

    life: int


class SessionLearned(Event, tag="learned"):
    """A session as a turn has left it, and how it is found from now on: see `SessionTable.adopt`."""

    session: Session
    label: int | None
    keys: list[int]
    has_prefilled: bool = True  # or may have, as told in a snapshot


class SessionDropped(Event, tag="dropped"):
    """An operator dropped this session."""

    session_id: str


class LegsUnderWay(Event, tag="legs"):
    """All legs of the sender that have not ended so."""

    legs: list[SentLeg]


class BookLearned(Event, tag="book"):
    """What is known of a worker's cache: see `Beliefs.adopt_lessons`."""

    lessons: BookLessons


class TokensCounted(Event, tag="tokens"):
    """An answer to the sender has counted tokens: see `TokenEstimator.take`."""

    model: str
    added: Amounts
    new_tokens: int
    completion_tokens: int | None


class EstimatesLearned(Event, tag="estimates"):
    """What is known of a model's tokens: see `TokenEstimator.adopt`."""

    estimates: Estimates


class HeadsComputed(Event, tag="heads"):
    """Heads that are new to a worker, and what they say of the order in a template: see `TemplateOrder.take`."""

    new: NewHeads


class TemplateLearned(Event, tag="template"):
    """What is known of the order in a model's chat template: see `TemplateOrder.adopt`."""

    model: str
    score: int


class RepliesLearned(Event, tag="replies"):
    """What is known of how a model's chat template renders replies: see `RenderedReplies.adopt`."""

    case: Case
    score: int


class LawsTold(Event, tag="laws"):
    """What a turn of the sender measured, or an operator reset: see `WorkerLaws.take`."""

    news: TurnTimes | LawsReset


class LawsLearned(Event, tag="laws-learned"):
    """All that turns have taught of the laws: see `WorkerLaws.adopt`."""

    lessons: LawsLessons


class HabitsLearned(Event, tag="habits"):
    """What is known of a model's answers and of its sessions' pauses: see `Forecasts.adopt`."""

    habits: ModelHabits


class EmbeddingsHeld(Event, tag="embeddings"):
    """What an engine has encoded or loaded: see `EncoderChooser.take`."""

    found: Embeddings


class EncodingCounted(Event, tag="encoding"):
    """What a worker has to encode for turns of the sender: see `EncoderChooser.count_elsewhere`."""

    count: ItemsToEncode


class UseChanged(Event, tag="use"):
    """What the legs of process `by` do on one worker."""

    by: int
    worker: WorkerId
    use: Use


class TurnsCounted(Event, tag="turns"):
    """How many turns the sender has inside the fleet, and how many wait; how many came since its last such event, and
    how many of these open a conversation."""

    inside: int
    waiting: int
    arrived: int = 0
    conversations: int = 0


class WorkerSeen(Event, tag="seen"):
    """A worker, as the leader sees it."""

    view: WorkerView


class WorkersPresent(Event, tag="present"):
    """All workers that there are; others are gone."""

    workers: list[WorkerId]


class WorkersAdded(Event, tag="added"):
    """The workers that an operator added and no config names, and those of the config that were replaced or removed."""

    workers: list[WorkerId]
    overruled: list[WorkerId]


class WorkerGone(Event, tag="gone"):
    worker: WorkerId


class CircuitChanged(Event, tag="circuit"):
    """The breaker of a worker or of a pair; None: it was forgotten."""

    key: WorkerId | tuple[WorkerId, WorkerId]
    circuit: Circuit | None


class PromptSuspected(Event, tag="suspected"):
    """By worker, when it ended a connection of this prompt; empty: the prompt was answered."""

    prompt: PrefixEnd
    losses: dict[str, float]


class EnginesMet(Event, tag="engines"):
    """See `health.strangers`."""

    met: list[tuple[Meeting, str]]


class PairsLeft(Event, tag="left"):
    """See `Canary.left_to_turns` and `Strangers.unproven`."""

    left_to_turns: list[tuple[WorkerId, WorkerId]]
    unproven: list[tuple[WorkerId, WorkerId]]


class LimitCharged(Event, tag="charged"):
    """A key has used this much of an allowance, in seconds of its refilling."""

    name: str
    limit: str
    seconds: float


class LimitOwed(Event, tag="owed"):
    """When a key's allowance is full again, as far as the sender knows."""

    name: str
    limit: str
    full_s: float


class ConfigChanged(Event, tag="config"):
    """An operator set these keys of the config."""

    keys: dict[str, object]


class ConfigRead(Event, tag="config-read"):
    """The live keys of the config as they are in force, and as its file said them last."""

    in_force: dict[str, object]
    in_file: dict[str, object]


class TurnReported(Event, tag="report"):
    """What a sidecar says of a turn that is not the sender's: `TurnReport.encode`."""

    report: bytes


class MetricsCounted(Event, tag="counted"):
    """The metrics of process `by`, as `merged_metrics.encoded` writes them."""

    by: int
    families: bytes


class PeerQuestion(Event, tag="ask"):
    """A question to one other process; the asker numbers them."""

    number: int
    what: str
    about: bytes = b""


class PeerAnswer(Event, tag="answered"):
    """The answer to the question of that number; a `PeerFailure` in `error` instead of a body where there is none."""

    number: int
    body: bytes = b""
    error: bytes = b""


AnyEvent = (
    Joined
    | JoinReply
    | SnapshotRequest
    | SnapshotEnd
    | SentLeg
    | LegOutcome
    | LegsUnderWay
    | CacheFound
    | BookLearned
    | TokensCounted
    | EstimatesLearned
    | HeadsComputed
    | TemplateLearned
    | RepliesLearned
    | LawsTold
    | LawsLearned
    | AnswerEnded
    | SessionReturned
    | HabitsLearned
    | EmbeddingsHeld
    | EncodingCounted
    | SessionLearned
    | SessionDropped
    | UseChanged
    | TurnsCounted
    | WorkerSeen
    | WorkersPresent
    | WorkersAdded
    | WorkerGone
    | CircuitChanged
    | PromptSuspected
    | EnginesMet
    | PairsLeft
    | LimitCharged
    | LimitOwed
    | ConfigChanged
    | ConfigRead
    | MetricsCounted
    | TurnReported
    | PeerQuestion
    | PeerAnswer
)

Appliers = Mapping[type[Any], Callable[[int, Any], object]]
"""By the type of an event: takes its sender and the event."""
