"""What an exchange of a turn needs until its answer has begun."""

from __future__ import annotations

import msgspec

from ..admission.web_pages import Headers
from ..bodies.body_memory import BodyRoom
from ..bodies.received import ReceivedBody
from ..errors import PPDError
from ..routing.service import Caller
from .request_head import RequestHead


class TurnReading(msgspec.Struct):
    """A request while it is read and answered. A stream may then be open for long without it."""

    head: RequestHead | None  # None: the request has come completely
    received: ReceivedBody
    memory: BodyRoom
    more: Headers  # of whatever answer
    caller: Caller | None = None
    waits_for_room: bool = False
    expects_continue: bool = False
    is_whole: bool = False  # it has come completely
    is_compressed: bool = False
    refused: PPDError | None = None  # an error that came before `begin`
