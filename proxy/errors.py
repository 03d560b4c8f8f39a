"""The exception classes of the project, with the HTTP status and the error body that a client gets for each.

PPDError
  ConfigError              a setting that cannot be used: its key, its value and what is allowed
  FormatError              a table, a heartbeat or another document that cannot be parsed; names the field
  RequestError             the client's own mistake, 4xx
    Unauthorized  Forbidden  NotFound  BodyTooLarge
  NoWorkerError            503: no worker can serve this now
    AllBusy                every worker that could has as many turns as it may have
  Refused                  the proxy's own limits: a reason, and when to come back
    RateLimited            429: the limits of this key
    Overloaded             503: the fleet is full, or the proxy drains
  LegError                 an upstream request failed: in which phase, from which cause (see `failures`)

Messages are written for the client: they never hold a worker's address, a key, or text of a prompt.
"""

from __future__ import annotations

import math

import msgspec

from .failures import Cause, Phase

OVERLOAD = (429, 503)  # statuses by which a worker says that it is busy, not broken


class PPDError(Exception):
    """The root; `status` is the HTTP status that a client gets, `kind` the `type` in OpenAI's error body."""

    status = 500
    kind = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ConfigError(PPDError):
    """A setting that cannot be used; `param` is the key."""

    status = 400  # if it comes through the admin API
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


class AllBusy(NoWorkerError):
    """The turn is to wait in the queue."""


class Refused(PPDError):
    """A turn that the proxy does not take now. `reason` is from a bounded set; `retry_after_s` is at least 1."""

    def __init__(self, message: str, *, reason: str, retry_after_s: float) -> None:
        super().__init__(message, code=reason)
        self.reason = reason
        self.retry_after_s = max(1.0, retry_after_s)


class RateLimited(Refused):
    """Reasons: requests_per_minute, tokens_per_minute."""

    status = 429
    kind = "rate_limit_error"


class Overloaded(Refused):
    """Reasons: queue_full, queue_timeout, workers_overloaded, draining, body_memory, body_reader."""

    status = 503
    kind = "overloaded_error"


class LegError(PPDError):
    """An upstream request that brought no answer: in which phase, and why. docs/failures.md says what follows.

    `status` is what the client gets if nothing else can be tried; `body` is a worker's own error, if the request itself
    is at fault; `worker` is for receipts and logs only.
    """

    kind = "upstream_error"

    def __init__(
        self,
        message: str,
        *,
        worker: str,
        phase: Phase,
        cause: Cause,
        status: int | None = None,
        body: bytes = b"",
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.phase = phase
        self.cause = cause
        self.status = status or (504 if cause is Cause.TIMEOUT else 502)
        self.body = body
        self.retry_after_s = retry_after_s

    @property
    def is_openai_error(self) -> bool:
        """Whether the body may go to the client: the engine's own error about the request, not an error of a proxy.

        What an engine says of itself (5xx) stays inside, as it may name other workers.
        """
        if self.cause is not Cause.REQUEST:
            return False
        try:
            return "error" in msgspec.json.decode(self.body.decode(), type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False


def refusal(status: int, body: bytes, *, worker: str, phase: Phase, retry_after_s: float = 0.0) -> LegError:
    cause = Cause.SERVER if phase is Phase.HEADERS else Cause.ERROR_EVENT
    seen: int | None = None
    if status in OVERLOAD:
        cause, seen = Cause.OVERLOADED, 503
    elif 400 <= status < 500:
        cause, seen = Cause.REQUEST, status
    message = f"the worker answered {status}"
    return LegError(
        message, worker=worker, phase=phase, cause=cause, status=seen, body=body, retry_after_s=retry_after_s
    )


def comes_back(exc: PPDError) -> dict[str, str]:
    """The headers that tell a client why it was refused, and in how many seconds to come back."""
    if isinstance(exc, Refused):
        return {"X-PPD-Refused": exc.reason, "Retry-After": str(math.ceil(exc.retry_after_s))}
    if isinstance(exc, LegError) and exc.cause is Cause.OVERLOADED:
        return {"X-PPD-Refused": "workers_overloaded", "Retry-After": str(max(1, math.ceil(exc.retry_after_s)))}
    return {"X-PPD-Refused": "no_worker", "Retry-After": "1"} if isinstance(exc, NoWorkerError) else {}


def error_body(message: str, kind: str, code: str | int | None, param: str | None = None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
