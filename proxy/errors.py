"""Errors of the project.

PPDError
  ConfigError              a key, a value and what is allowed
  FormatError              a table, a heartbeat or another document that cannot be read; names the field
  RequestError             the client's own mistake, 4xx
    Unauthorized  Forbidden  NotFound  BodyTooLarge
  NoWorkerError            503: nobody can serve this now
  LegError                 an upstream request failed
    WorkerUnreachable      502: refused, reset, or gone before it answered
    WorkerTimeout          504
      AnswerTimeout        a whole answer took too long: not tried again
    WorkerRefused          the worker's own error answer: status and body

Messages are written for the client: they never hold a worker's address, a key, or text of a prompt.
"""

from __future__ import annotations

import msgspec


class PPDError(Exception):
    """The root; `status` is the HTTP status a client sees, `kind` the `type` in OpenAI's error body."""

    status = 500
    kind = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ConfigError(PPDError):
    """A setting that cannot be used; `param` is the key."""

    status = 400  # where it comes by the admin API
    kind = "invalid_request_error"


class FormatError(PPDError):
    """A document or message that does not have the shape its version promises."""

    status = 400
    kind = "invalid_request_error"


class RequestError(PPDError):
    status = 400
    kind = "invalid_request_error"


class Unauthorized(RequestError):
    status = 401
    kind = "authentication_error"


class Forbidden(RequestError):
    status = 403
    kind = "permission_error"


class NotFound(RequestError):
    status = 404
    kind = "not_found_error"


class BodyTooLarge(RequestError):
    status = 413


class NoWorkerError(PPDError):
    status = 503
    kind = "service_unavailable_error"


class LegError(PPDError):
    """An upstream request that brought no answer; `worker` is for receipts and logs only."""

    status = 502
    kind = "upstream_error"

    def __init__(self, message: str, *, worker: str) -> None:
        super().__init__(message)
        self.worker = worker


class WorkerUnreachable(LegError):
    pass


class WorkerTimeout(LegError):
    status = 504


class AnswerTimeout(WorkerTimeout):
    """A whole answer that was not there in time: computing it once more elsewhere would take as long."""


class WorkerRefused(LegError):
    """The worker answered with an error; status and body are its own."""

    def __init__(self, status: int, body: bytes, *, worker: str) -> None:
        super().__init__(f"the worker answered {status}", worker=worker)
        self.status = status if 400 <= status < 600 else 502
        self.body = body

    @property
    def is_openai_error(self) -> bool:
        """Whether the body may go to the client: an engine's own words, not those of a proxy before it."""
        try:
            return "error" in msgspec.json.decode(self.body, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False


def error_body(message: str, kind: str, code: str | int | None, param: str | None = None) -> bytes:
    """An error in the shape that OpenAI's clients parse."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
