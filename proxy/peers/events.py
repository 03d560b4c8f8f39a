"""What the processes of one proxy tell each other. Each names a state as it is now, so that the newest one stands.

On the wire a packet is a list of these as msgpack, each an array that begins with its tag.
"""

from __future__ import annotations

import msgspec

from ..fleet.view import WorkerView
from ..fleet.worker import WorkerId
from ..health.circuit_breaker import Circuit
from ..sessions.session import Session


class Event(msgspec.Struct, array_like=True, gc=False):
    """The base of all."""


class Hello(Event, tag="hello"):
    """A process has begun, perhaps in the place of one that ended: it knows nothing, and runs nothing."""

    life: int  # no predecessor has the same


class Greeting(Event, tag="greeting"):
    """The answer of each, with what it does itself."""

    life: int
    knows: bool  # and could teach; one that has just begun could not


class Teach(Event, tag="teach"):
    """Asks one that knows for all that it knows."""

    life: int


class Caught(Event, tag="caught"):
    """That was all, but for what is new."""

    life: int


class Learned(Event, tag="learned"):
    """A session as a turn has left it, and how it is found from now on: see `SessionTable.adopt`."""

    session: Session
    label: int | None
    keys: list[int]


class Forgotten(Event, tag="forgotten"):
    """An operator dropped this session."""

    session_id: str


class Used(Event, tag="used"):
    """What the legs of process `by` do on one worker."""

    by: int
    worker: WorkerId
    inflight: int
    queued_prefill_tokens: int
    written_tokens: int


class Came(Event, tag="came"):
    """So many turns have come to the sender since it said so last, and with them conversations."""

    turns: int
    conversations: int


class InflightCount(Event, tag="inside"):
    """How many turns the sender has inside the fleet, and how many wait there."""

    turns: int
    waiting: int


class Seen(Event, tag="seen"):
    """A worker, as the process that watches them sees it."""

    view: WorkerView


class Present(Event, tag="present"):
    """All workers that there are; others are gone."""

    workers: list[WorkerId]


class Added(Event, tag="added"):
    """The workers that an operator added, which no config names."""

    workers: list[WorkerId]


class Gone(Event, tag="gone"):
    """A worker that is known no more."""

    worker: WorkerId


class Broke(Event, tag="broke"):
    """The breaker of a worker or of a pair, as a leg has left it; None: there is none any more."""

    key: WorkerId | tuple[WorkerId, WorkerId]
    circuit: Circuit | None


class Flown(Event, tag="flown"):
    """The pairs that canaries have tried, and those of them that turns are to try."""

    tried: list[tuple[WorkerId, WorkerId]]
    left_to_turns: list[tuple[WorkerId, WorkerId]]


class Charged(Event, tag="charged"):
    """A key has used this much of an allowance, in seconds of its refilling."""

    name: str
    limit: str
    seconds: float


class Owed(Event, tag="owed"):
    """When a key's allowance is full again, as far as the sender knows."""

    name: str
    limit: str
    full_s: float


class Changed(Event, tag="changed"):
    """An operator set these keys of the config."""

    keys: dict[str, object]


class Counted(Event, tag="counted"):
    """The metrics of process `by`, as `totals.families` writes them."""

    by: int
    families: bytes


class PeerQuestion(Event, tag="ask"):
    """A question to one other process; the asker numbers them."""

    number: int
    what: str
    about: bytes = b""


class PeerAnswer(Event, tag="answer"):
    """What was asked by that number; `error` instead of a body where it can't be done."""

    number: int
    body: bytes = b""
    error: bytes = b""


AnyEvent = (
    Hello
    | Greeting
    | Teach
    | Caught
    | Learned
    | Forgotten
    | Used
    | Came
    | InflightCount
    | Seen
    | Present
    | Added
    | Gone
    | Broke
    | Flown
    | Charged
    | Owed
    | Changed
    | Counted
    | PeerQuestion
    | PeerAnswer
)
