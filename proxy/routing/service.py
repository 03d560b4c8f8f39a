"""A turn for any data plane: a request's headers and body in, a status, headers and a body out."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
from msgspec.structs import replace

from ..admission.auth import authenticate, check_use, forced_route, leg_headers, queue_patience_s, slo_targets
from ..admission.key_file import KeyRing
from ..admission.keys import Client
from ..admission.queue import effective_priority
from ..admission.rate_limits import with_limits
from ..admission.scoped_requests import in_scope
from ..admission.web_pages import check_is_json
from ..bodies.body_reader import Body, BodyReader
from ..config import ProxyConfig
from ..errors import PPDError, RateLimited, answer_body, comes_back, without_frames
from ..laws.targets import GivenTargets
from ..openai.body_members import Edited, encoded
from ..openai.prompt_list import prompt_list
from ..openai.request import Endpoint, Request
from ..policy import Route
from ..telemetry.receipts import Receipt, new_id, now_text
from .attempt import TurnContext
from .prompt_fan_out import Answering, FanOut, ListTurn
from .receipt_notes import decision_headers
from .router import TurnReply
from .state import State

log = logging.getLogger(__name__)

JSON = "application/json"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class Caller(msgspec.Struct, frozen=True):
    """Who asks, as the request's head says, before its body is read."""

    endpoint: Endpoint
    headers: Mapping[str, str]  # names in lower case
    client: Client
    forced: Route | None
    slo: GivenTargets | None
    receipt: Receipt


class TurnService:
    """Answers turns; a PPDError becomes a reply."""

    def __init__(
        self,
        config: ProxyConfig,
        state: State,
        router: Answering,
        keys: KeyRing | None,
        *,
        bodies: BodyReader,
        may_force: bool = True,
        explained: Callable[[Receipt], dict[str, str]] = decision_headers,
    ) -> None:
        """may_force: whether a request may ask for its route; else it is not heard.

        explained: the headers of an error that tell what was done.
        """
        self._config = config
        self._state = state
        self._router = router
        self._fan_out = FanOut(router)
        self._keys = keys
        self._bodies = bodies
        self._may_force = may_force
        self._explained = explained

    def caller(self, endpoint: Endpoint, headers: Mapping[str, str], *, asks_key: bool = True) -> Caller:
        """Raises PPDError where this client may not ask. asks_key: False where another has asked for it."""
        client = authenticate(headers, self._keys if asks_key else None)
        check_is_json(headers)
        forced = forced_route(headers, self._config.admin_key) if self._may_force else None
        receipt = _new_receipt(endpoint, headers, client)
        return Caller(endpoint, headers, client, forced, slo_targets(headers), receipt)

    async def answer(self, caller: Caller, body: Body) -> TurnReply:
        """The caller must call the reply's `written`, and in the end `abandon` on a streamed body."""
        reply = await self._answer(caller, body)
        if caller.client.is_limited:
            reply.written()  # what the turn has taken counts
            limits = self._state.rate_limits.headers(caller.client, self._state.now())
            reply.headers = with_limits(reply.headers, limits)
        return reply

    def rejected(self, status: int, receipt: Receipt | None = None) -> None:
        """Counts a request that was refused, unless its receipt is closed: then it was a turn, and has counted."""
        if receipt is None or receipt.outcome == "running":
            self._state.metrics.rejected.labels(str(status)).inc()

    async def _answer(self, caller: Caller, body: Body) -> TurnReply:
        receipt, prompts = caller.receipt, None
        try:
            request, context = await self.read(caller, body)
            is_list = request.endpoint is Endpoint.COMPLETIONS  # the only one that takes several prompts
            prompts = prompt_list(request, self._config.body_limit_bytes) if is_list else None
            if prompts is None:
                return await self._router.answer(self.in_scope(caller, request), receipt, context)
            self._state.rate_limits.take(caller.client, 0, self._state.now(), requests=len(prompts.prompts))
            each = replace(context, is_counted=True)
            return await self._fan_out.answer(ListTurn(prompts, partial(self._parse_one, caller), receipt, each))
        except PPDError as exc:
            without_frames(exc)
            if prompts is None or isinstance(exc, RateLimited):  # else each prompt of the list is a turn
                self.rejected(exc.status, receipt)
            reply = error_reply(exc, caller.endpoint)
            reply.headers.update(self._explained(receipt))
            return reply
        except Exception as exc:
            # Its text may hold addresses: the client gets none of it.
            log.error("request %s failed", receipt.id, exc_info=exc)
            return error_reply(PPDError("internal error"), caller.endpoint)

    async def read(self, caller: Caller, body: Body) -> tuple[Request, TurnContext]:
        """The turn that the caller asks for. PPDError for an invalid body, or a model that its key may not use."""
        request = in_class(await self._parse(caller, body), caller.client)
        check_use(caller.client, request.model)
        caller.receipt.model, caller.receipt.stream = request.model, request.stream
        return request, self._context(caller)

    def _context(self, caller: Caller) -> TurnContext:
        forwards_key = self._keys is None and not self._config.worker_api_key
        legs = leg_headers(caller.headers, forwards_key=forwards_key, scope=caller.client.scope)
        legs["content-type"] = JSON  # it was parsed as such, whichever of JSON's types the client gave
        patience_s = queue_patience_s(caller.headers)
        return TurnContext(caller.client, legs, caller.forced, caller.slo, patience_s, given=caller.headers)

    async def _parse_one(self, caller: Caller, body: bytes) -> Request:
        """One prompt of a list; the list itself was checked."""
        return self.in_scope(caller, await self._parse(caller, body))

    def in_scope(self, caller: Caller, request: Request) -> Request:
        """The request as workers may see it, of one prompt. NotFound for another tenant's response."""
        return in_scope(request, caller.client, self._state.sessions)

    async def _parse(self, caller: Caller, body: Body) -> Request:
        return await self._bodies.turn(caller.endpoint, caller.headers, caller.client, body)


def in_class(request: Request, client: Client) -> Request:
    """The request with a `priority` that its client's key allows: engines schedule by it."""
    if not client.name or request.priority is None:
        return request
    allowed = effective_priority(client.priority, request.priority)
    fields = Edited.of(request.fields, {"priority": encoded(allowed)})
    return replace(request, priority=allowed, fields=fields)


def error_reply(exc: PPDError, path: str = "") -> TurnReply:
    return TurnReply(JSON, comes_back(exc), answer_body(exc, path), exc.status)


def _new_receipt(endpoint: Endpoint, headers: Mapping[str, str], client: Client) -> Receipt:
    """Keeps the client's request id where it is harmless, so that its logs and ours can be joined."""
    given = headers.get("x-request-id", "")
    return Receipt(
        id=given if given and _REQUEST_ID.fullmatch(given) else new_id(),
        at=now_text(),
        endpoint=endpoint,
        client=client.name,
        model="",
        stream=False,
        session="",
        turn=0,
        kind="",
    )
