"""Attempts at turns as the router makes them, without a router; and where the KV of their sessions lies."""

from __future__ import annotations

from typing import Any

from ppd.proxy.admission.keys import Client
from ppd.proxy.beliefs.beliefs import Beliefs
from ppd.proxy.beliefs.held import PromptEntry, Residency
from ppd.proxy.beliefs.turn_touches import TurnCaches, TurnTouches
from ppd.proxy.failures import Leg
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.ledger import LegEstimates
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Role, Worker, WorkerId
from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Request
from ppd.proxy.policy import Decision, Route
from ppd.proxy.routing.attempt import Attempt
from ppd.proxy.sessions.table import SessionMatch, SessionTable, TurnOutcome
from ppd.proxy.telemetry.receipts import LegRecord, Receipt
from tests.support.requests import parse

D1 = Residency(WorkerId("d1:80"), "i", 100)
D2 = Residency(WorkerId("d2:80"), "i", 100)
P1 = Residency(WorkerId("p1:80"), "i", 90)
ROUTES = {Leg.PREFILL: Route.SPLIT, Leg.DECODE: Route.SPLIT, Leg.LOCAL: Route.LOCAL, Leg.REPLICA: Route.REPLICA}


def view(role: Role, number: int = 1, address: str = "") -> WorkerView:
    worker = Worker(role=role, address=address or f"{role.lower()}{number}:1", models=("m",))
    return WorkerView(worker=worker, name=f"{role}{number}", incarnation="i")


def decision(leg: Leg, prefill: WorkerView | None = None, decode: WorkerView | None = None) -> Decision:
    route = ROUTES[leg]
    needs_p = prefill or view(Role.PREFILL) if route is Route.SPLIT else None
    role = Role.REPLICA if leg is Leg.REPLICA else Role.DECODE
    return Decision(route=route, reason="", decode=decode or view(role), prefill=needs_p, wanted=route)


def running(made: Decision, *begun: Leg, stream: bool = True) -> Attempt:
    """An attempt of which these legs were begun."""
    request, registry = parse(stream=stream), Registry()
    decode, prefill = made.decode.id, made.prefill.id if made.prefill else None
    receipt = Receipt(id="r", at="", endpoint="", model="m", stream=stream, session="", turn=1, kind="first")
    receipt.legs = [LegRecord(kind=leg, worker="", address="", started_s=0.0) for leg in begun]
    return Attempt(
        request=request,
        decision=made,
        decode=decode,
        receipt=receipt,
        client=Client(name="", tenant=""),
        booking=LegBooking(registry, decode, prefill, LegEstimates(prompt_tokens=0, new_tokens=0)),
        touches=TurnTouches(Beliefs(registry.engine), PromptEntry(0), {}, 0, TurnCaches(decode, prefill)),
        charged_tokens=0,
        headers={},
        started_s=0.0,
        asked_s=0.0,
        history=0,
    )


# -- turns of a session table whose engine counts a token for two bytes


def tokens(request: Request) -> int:
    """The engine's: one for two bytes of the prompt."""
    return request.prompt_bytes // 2


def request(*messages: dict[str, Any], **members: Any) -> Request:
    return parse(prompt=list(messages), **members)


def find(table: SessionTable, *messages: dict[str, Any], **members: Any) -> SessionMatch:
    return table.find(request(*messages, **members).prompt, 0.0)


def turn(
    table: SessionTable, *messages: dict[str, Any], reply: str = "r" * 200, decode: Any = D1, **members: Any
) -> SessionMatch:
    asked = request(*messages, **members)
    match = table.find(asked.prompt, 0.0)
    key = ReplyKey(asked)
    key.add_text(reply)
    outcome = TurnOutcome(
        prompt_tokens=tokens(asked),
        completion_tokens=(16 + len(reply)) // 2,
        reply_key=key.key(),
        reply_alone=key.alone(),
        decode=decode,
    )
    table.finish(match, asked.prompt, outcome, 0.0)
    return match


def bytes_of(*messages: dict[str, Any]) -> int:
    return request(*messages).prompt_bytes
