"""Requests as workers may see them: in the scope of the tenant that sent them."""

from __future__ import annotations

from msgspec.structs import replace

from ..errors import NotFound
from ..openai.request import Endpoint, Request
from ..sessions.session import Prompt, response_key
from ..sessions.table import SessionTable
from .keys import Client

RESPONSE_ID_LIMIT = 128  # characters; longer ones are shown cut in errors


def in_scope(request: Request, client: Client, sessions: SessionTable) -> Request:
    """With the tenant's salt and ids. NotFound for another tenant's response."""
    scope, prompt = client.scope, request.prompt
    if scope is None:
        return request
    previous = prompt.previous_response_id
    if previous is not None and not scope.owns(previous) and not _is_known(previous, prompt, sessions):
        raise no_such_response(previous, "previous_response_id")
    is_response = request.endpoint is Endpoint.RESPONSES
    return replace(request, fields=scope.fields(request.fields, request.cache_salt, is_response=is_response))


def named_afresh(request: Request, client: Client) -> Request:
    """For another attempt: the legs of some connectors meet by a response's id, which is good for one."""
    if client.scope is None or request.endpoint is not Endpoint.RESPONSES:
        return request
    return replace(request, fields=client.scope.renamed(request.fields))


def _is_known(response_id: str, prompt: Prompt, sessions: SessionTable) -> bool:
    """Of a worker that gave it another id than it was asked to, or made with a key that has been withdrawn since."""
    scope = prompt.response_scope
    return scope is not None and sessions.holder(response_key(prompt.chain.hasher, scope, response_id)) is not None


def no_such_response(response_id: str, param: str = "response_id", asked: int | None = None) -> NotFound:
    """asked: so many workers, and others that may have it were not; None: nobody has it."""
    where = "" if asked is None else f" on {asked} workers; no others were asked"
    shown = response_id if len(response_id) <= RESPONSE_ID_LIMIT else f"{response_id[:RESPONSE_ID_LIMIT]}..."
    return NotFound(f"Response with id {shown!r} not found{where}.", param=param)
