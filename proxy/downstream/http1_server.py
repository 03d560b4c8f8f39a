"""`Http1Server` makes the exchange of each HTTP/1.1 request, after the last checks of its head."""

from __future__ import annotations

from functools import partial
from urllib.parse import unquote

from ..config import ProxyConfig
from ..errors import Forbidden, RequestError
from ..openai.request import Endpoint
from ..routing.service import TurnService
from .asgi_edge import Edge
from .asgi_exchange import AsgiExchange, RefusedExchange
from .http1_connection import ClientConnection, Exchange
from .request_head import OFFERED, RequestHead
from .stream_splice import SilenceWatch
from .turn_exchange import TurnExchange, TurnSite

_TURNS = {endpoint.value.encode(): endpoint for endpoint in Endpoint}


class Http1Server:
    """Makes the exchange for each request: a `TurnExchange` for a turn, an `AsgiExchange` for anything else.

    service: answers turns; None: the application answers them too.
    """

    def __init__(self, edge: Edge, service: TurnService | None, config: ProxyConfig) -> None:
        self.patience_s = config.idle_timeout_s
        self.head_limit_bytes = config.head_limit_bytes
        self._edge = edge
        self._turns: TurnSite | None = None
        if service is not None:
            silence = SilenceWatch(config.idle_timeout_s)
            self._turns = TurnSite(edge.requests, service, silence, config.body_limit_bytes)

    def exchange(self, connection: ClientConnection, head: RequestHead) -> Exchange:
        path = head.target.partition(b"?")[0]
        origins = self._edge.origins
        more = () if origins.is_off else origins.headers(head.fields.get("origin"), unquote(path.decode("latin-1")))
        refused = _head_error(head)
        if refused is not None:
            note = partial(self._edge.refused, head.method.decode("latin-1"), path.decode("latin-1"))
            return RefusedExchange(connection, refused, note, head.target, more)
        endpoint = _TURNS.get(path) if head.method == b"POST" else None
        if endpoint is None or self._turns is None:
            return AsgiExchange(connection, head, self._edge, more)
        return TurnExchange(connection, head, endpoint, self._turns, self._edge.body_memory.room(), more)

    def refusal(self, connection: ClientConnection, error: RequestError) -> Exchange:
        return RefusedExchange(connection, error, partial(self._edge.refused, "", ""))


def _head_error(head: RequestHead) -> RequestError | None:
    """Errors against HTTP that the parser does not find, and features that are not supported."""
    fields = head.fields
    repeats_host = len(fields) < len(head.headers) and [name for name, _ in head.headers].count(b"host") > 1
    if repeats_host or ("host" not in fields and not head.is_old):
        return RequestError("host: exactly one Host header is required", param="host")
    if fields.get("transfer-encoding", "chunked").lower() != "chunked":
        error = RequestError("transfer-encoding: must be chunked, or absent", param="transfer-encoding")
        error.status = 501
        return error
    if "transfer-encoding" in fields and head.is_old:
        return RequestError("transfer-encoding: is not allowed in HTTP/1.0", param="transfer-encoding")
    # A client that offers clear-text HTTP/2 is answered over HTTP/1.1; a WebSocket has no such fallback.
    if fields.get(OFFERED.decode(), "").lower() == "websocket":
        return Forbidden("WebSocket is not supported", param="upgrade")
    return None
