"""The encoders that a picker has chosen for a turn: named in its head, and booked until its prompt is computed."""

from __future__ import annotations

from collections.abc import Mapping

from ..encoders.choosing import Choices, ItemDecision
from ..encoders.encoder_chooser import EncoderTurn, as_text
from ..fleet.worker import WorkerId
from ..routing.attempt import Attempt
from ..routing.state import State
from ..telemetry.receipts import EncoderRecord
from .headers import ENCODER_ITEMS, ENCODERS

NAMED_LIMIT = 64  # E in one head; of more items than that, the next ones go to the first of them again


class PickedEncoders:
    """Each call states what has happened, and may come twice."""

    def __init__(self, state: State, turn: EncoderTurn, choices: Choices) -> None:
        self._state = state
        self._choices = choices
        self._media = turn.request.media
        self._until_computed = state.encoders.until_computed(turn, choices.decisions)
        self._is_booked = True
        self._began_s = state.now()
        self.record = EncoderRecord(began_s=self._began_s - turn.started_s)
        self._note()
        self._uses = [state.registry.reserve(view.id) for view, _ in choices.batches]
        for view, _ in choices.batches:
            state.health.breakers.began(view.id, self._began_s)

    @classmethod
    def of(cls, state: State, attempt: Attempt) -> PickedEncoders | None:
        """None: the turn has no media, or the fleet no encoder."""
        if not attempt.request.media:
            return None
        turn = attempt.encoder_turn
        choices = state.encoders.choose(turn)
        if choices is None:
            return None
        picked = cls(state, turn, choices)
        attempt.receipt.note_encoders(picked.record)
        return picked

    @property
    def headers(self) -> Mapping[str, str]:
        return headers_of(self._choices)

    def failed(self, worker: WorkerId) -> None:
        """This E has failed a leg. Nobody tells which items were in it, so all of its count as failed."""
        for name, view in self._choices.encoders.items():
            if view.id == worker:
                self._choices.decisions[name] = ItemDecision.FAILED
        self._note()

    def computed(self, *, well: bool) -> None:
        """The prompt is, or will not be."""
        if self._is_booked:
            self._is_booked = False
            self._until_computed(well)
            for (view, _), used in zip(self._choices.batches, self._uses, strict=True):
                self._state.registry.release(view.id, used)

    def ended(self, *, well: bool) -> None:
        """The turn has; well: it was answered, so an E of which no failure was told has encoded its items."""
        self.computed(well=False)
        decisions, health = self._choices.decisions, self._state.health
        for view, items in self._choices.batches:
            health.breakers.abandoned(view.id, self._began_s)
            encoded = [item for item in items if decisions[item.name] is ItemDecision.ENCODED]
            if well and encoded:
                health.succeeded(view.id)
                self._state.encoders.encoded(view, encoded)

    def _note(self) -> None:
        self.record.items = as_text(self._media, self._choices.decisions)


def headers_of(choices: Choices) -> dict[str, str]:
    """What tells a sidecar which E encodes which item; nothing where none does."""
    encoders = choices.encoders
    if not encoders:
        return {}
    named = [view.worker.address for view in encoders.values()][:NAMED_LIMIT]
    sent = {ENCODERS: ",".join(named if len(set(named)) > 1 else named[:1])}
    if len(encoders) < len(choices.decisions):
        sent[ENCODER_ITEMS] = ",".join(str(at) for at, name in enumerate(choices.decisions) if name in encoders)
    return sent
