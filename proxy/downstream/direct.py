"""The direct data plane: clients' plain HTTP/1.1 connections, served without a server between them and the turns."""

from __future__ import annotations

from ..config import ProxyConfig
from ..errors import Forbidden, RequestError
from ..openai.request import Endpoint
from ..routing.service import TurnService
from .asgi_edge import Edge
from .asgi_exchange import AsgiExchange, RefusedExchange
from .http1_connection import ClientConnection, Exchange
from .request_head import OFFERED, RequestHead
from .turn_exchange import TurnExchange

_TURNS = {endpoint.value.encode(): endpoint for endpoint in Endpoint}


class Direct:
    """Makes the exchange for each request: a turn's own, else one with the application."""

    def __init__(self, edge: Edge, service: TurnService, config: ProxyConfig) -> None:
        self.patience_s = config.idle_timeout_s
        self.head_limit_bytes = config.head_limit_bytes
        self._body_limit_bytes = config.body_limit_bytes
        self._edge = edge
        self._service = service

    def exchange(self, connection: ClientConnection, head: RequestHead) -> Exchange:
        refused = _odd(head)
        if refused is not None:
            return RefusedExchange(connection, refused)
        path = head.target.partition(b"?")[0]
        endpoint = _TURNS.get(path) if head.method == b"POST" else None
        if endpoint is None:
            return AsgiExchange(connection, head, self._edge)
        return TurnExchange(
            connection,
            head,
            endpoint,
            self._edge,
            self._service,
            body_limit_bytes=self._body_limit_bytes,
            idle_s=self.patience_s,
        )

    def refusal(self, connection: ClientConnection, error: RequestError) -> Exchange:
        return RefusedExchange(connection, error)


def _odd(head: RequestHead) -> RequestError | None:
    """What HTTP forbids and its parser lets through, and what is not spoken here."""
    fields = head.fields
    repeats_host = len(fields) < len(head.headers) and [name for name, _ in head.headers].count(b"host") > 1
    if repeats_host or ("host" not in fields and not head.is_old):
        return RequestError("host: must be named once", param="host")
    if fields.get("transfer-encoding", "chunked").lower() != "chunked":
        error = RequestError("transfer-encoding: must be chunked, or absent", param="transfer-encoding")
        error.status = 501
        return error
    if "transfer-encoding" in fields and head.is_old:
        return RequestError("transfer-encoding: HTTP/1.0 has none", param="transfer-encoding")
    # A client that offers HTTP/2 in clear text is answered as it asked; one that needs a WebSocket can't be.
    if fields.get(OFFERED.decode(), "").lower() == "websocket":
        return Forbidden("nothing here speaks WebSocket", param="upgrade")
    return None
