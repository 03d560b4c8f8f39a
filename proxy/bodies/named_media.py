"""A request with its media named, in the process that reads its body."""

from __future__ import annotations

from msgspec.structs import replace

from ..media.items import named
from ..openai.body_members import Edited
from ..openai.prompts.shapes import REASONING
from ..openai.request import MESSAGES_MEMBER, Endpoint, Request


def with_named_media(request: Request, tenant: str, limit: int) -> Request:
    """Of one that has media. RequestError for those that no engine may be sent: see `named`.

    A salt keeps caches apart as a tenant does. Behind a picker it is what tells tenants apart.
    """
    member = MESSAGES_MEMBER[request.endpoint]
    owner = f"{tenant}\0{request.cache_salt}" if request.cache_salt else tenant
    no_units = REASONING if request.endpoint is Endpoint.RESPONSES else ()
    prompt, items = named(request.fields[member], member, owner, limit, no_units)
    return replace(request, fields=Edited.of(request.fields, {member: prompt}), media=tuple(items))
