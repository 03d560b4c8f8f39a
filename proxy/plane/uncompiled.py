"""The parsers of `http1` for machines without it, by httptools: the same calls, the same values, more time."""

from __future__ import annotations

from typing import Protocol

import httptools

_SUCCESSFUL = 200
_BODILESS = (204, 304)
_PASSED_BYTES = 256 * 1024  # of trailers, or of extensions between two parts of a body, at most: as of a head


class NotHttp(ValueError):
    """The bytes are not HTTP/1.1."""


class Connection(Protocol):
    def on_message_begin(self) -> None: ...

    def on_head(self) -> None: ...

    def on_body(self, data: bytes) -> None: ...

    def on_message_complete(self) -> None: ...


class RequestParser:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.on_body, self.on_message_complete = connection.on_body, connection.on_message_complete
        self._parser = httptools.HttpRequestParser(self)
        self.method = self.target = b""
        self.version = ""
        self.headers: list[tuple[bytes, bytes]] = []
        self.fields: dict[str, str] = {}
        self.keeps_alive = self.offers_upgrade = self._is_in_head = False

    def feed(self, data: bytes) -> int:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            return int(exc.args[0])
        except httptools.HttpParserCallbackError as exc:
            raise exc.__context__ or exc from None
        except httptools.HttpParserError:
            raise NotHttp from None
        return len(data)

    def on_message_begin(self) -> None:
        self.target, self.headers, self._is_in_head = b"", [], True
        self._connection.on_message_begin()

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # else it is a trailer, which is ignored
            self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        parser = self._parser
        self.fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(self.headers)}
        self.method, self.version = parser.get_method(), parser.get_http_version()
        self.keeps_alive, self.offers_upgrade = parser.should_keep_alive(), parser.should_upgrade()
        self._connection.on_head()
        self.headers, self.fields = [], {}


class AnswerParser:
    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self.next()

    def next(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.is_whole = self.is_followed = self.can_be_kept = self.lasts_until_closed = False
        self._bodiless_bytes = 0

    def feed(self, data: bytes) -> bytes:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as exc:
            raise exc.__context__ or exc from None
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self.is_whole:
                raise NotHttp from None
            self.is_followed = True
        parts, self._parts = self._parts, []
        self._bodiless_bytes = 0 if parts or not self.status else self._bodiless_bytes + len(data)
        if self._bodiless_bytes > _PASSED_BYTES and not self.is_whole:  # of a line, httptools tells once it is whole
            raise NotHttp
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def on_message_begin(self) -> None:
        if self.is_whole:  # no request is open for this one
            self.is_followed = True
        elif not self.status:
            self.headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:
            self.headers[name.lower()] = value.rstrip(b" \t")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not self.is_followed and status >= _SUCCESSFUL:
            self.status = status
            is_sized = b"content-length" in self.headers or b"transfer-encoding" in self.headers
            self.lasts_until_closed = not (is_sized or status in _BODILESS)

    def on_body(self, data: bytes) -> None:
        if self.status and not self.is_whole:  # else it is of an informational answer, or behind the end
            self._parts.append(data)

    def on_message_complete(self) -> None:
        if not self.is_whole and self.status:  # else it was an informational one
            self.is_whole = True
            self.can_be_kept = self._parser.should_keep_alive() and not self.lasts_until_closed
