"""State that every process of one proxy holds: how its owner hears of the others' changes and sends its own."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import ParamSpec, Protocol

P = ParamSpec("P")


class Replicated(Protocol[P]):
    """The other processes' copies of one piece of state; `P` is what `changed` is told of a change.

    The owner holds it as its attribute `replicated`, which is None in a proxy of one process: a turn then pays nothing.
    """

    def catch_up(self) -> None:
        """Applies what the others have sent until now. Called before a decision reads the state."""

    def changed(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Sends a change that was made here. What others sent is applied without calling this."""


class ReplicatedAtOnce(Replicated[P], Protocol[P]):
    """What the others must know before a client hears of it. `changed` alone may send it a little later."""

    def tell(self) -> None:
        """When this returns, all that was changed has been sent."""

    def told(self) -> Awaitable[None]:
        """Done when all that was changed has been sent, with what else changes in this round of the event loop."""
