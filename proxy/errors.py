"""The exception classes of the project, with the HTTP status and the error body that a client gets for each.

PPDError
  ConfigError              a setting that cannot be used: its key, its value and what is allowed
    ConfigErrors           several of them
  FormatError              a table, a heartbeat or another document that cannot be parsed; names the field
  RequestError             the client's own mistake, 4xx
    Unauthorized  Forbidden  NotFound  BodyTooLarge  HeadTooLarge  UnsupportedMediaType
  LoopDetected             508: the request has passed too many proxies
  NoWorkerError            503: no worker can serve this now
    AllBusy                every worker that could has as many turns as it may have
    AllDown                every worker that could is down
  Refused                  the proxy's own limits: a reason, and when to come back
    RateLimited            429: the limits of this key
    Overloaded             503: the fleet is full, or the proxy drains; 429 where all workers say 429
    PoisonedPrompt         503: workers ended the connection at this prompt
  LegError                 an upstream request failed: in which phase, from which cause (see `failures`)

Messages are written for the client: they never hold a worker's address, a key, or text of a prompt.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import msgspec

from .failures import Cause, Phase

MESSAGES = "/v1/messages"
# https://docs.anthropic.com/en/api/errors; clients raise by the status, and show the type.
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NO_MODEL = re.compile(r"The model `.{1,256}` does not exist")  # vLLM on Messages, which has no `param`
_RESPONSE_PARAMS = ("response_id", "previous_response_id")  # what vLLM's 404, and OpenAI's, names
TOO_MANY = 429
OVERLOAD = (TOO_MANY, 503)  # statuses by which a worker says that it is busy, not broken
WORKERS_LOST = "workers_lost"  # the code of a turn that has ended the connections of several workers
_OF_REQUEST = (Cause.REQUEST, Cause.UNKNOWN_MODEL, Cause.UNKNOWN_RESPONSE)
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that it cannot decode, or that are nested too deep."""
LOOP = 508  # a worker that is a proxy says so: whichever worker is asked, the request goes round


class PPDError(Exception):
    """The root; `status` is the HTTP status that a client gets, `kind` the `type` in OpenAI's error body."""

    status = 500
    kind = "internal_error"
    is_of_request = False  # the request or its key is at fault, and no fleet would have served it

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ConfigError(PPDError):
    """A setting that cannot be used; `param` is the key."""

    status = 400  # if it comes through the admin API
    kind = "invalid_request_error"


class ConfigErrors(ConfigError):
    """All that cannot be used; `param` is the first one's."""

    def __init__(self, errors: Iterable[PPDError]) -> None:
        self.errors = tuple(errors)
        told = "; ".join(error.message for error in self.errors)
        super().__init__(f"{len(self.errors)} settings cannot be used: {told}", param=self.errors[0].param)

    def in_lines(self) -> str:
        """For a terminal."""
        return "\n  ".join((f"{len(self.errors)} settings cannot be used:", *(error.message for error in self.errors)))


class FormatError(PPDError):
    """A document or message that does not have the shape its version promises."""

    status = 400
    kind = "invalid_request_error"


class RequestError(PPDError):
    status = 400
    kind = "invalid_request_error"
    is_of_request = True


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


class HeadTooLarge(RequestError):
    status = 431


class UnsupportedMediaType(RequestError):
    status = 415


class LoopDetected(PPDError):
    status = LOOP
    kind = "invalid_request_error"


class NoWorkerError(PPDError):
    status = 503
    kind = "service_unavailable_error"


class AllBusy(NoWorkerError):
    """The turn is to wait in the queue."""


class AllDown(NoWorkerError):
    """The turn is to wait in the queue until one is back."""


class Refused(PPDError):
    """A turn that the proxy does not take now. `reason` is from a bounded set; `retry_after_s` is at least 1."""

    def __init__(self, message: str, *, reason: str, retry_after_s: float) -> None:
        super().__init__(message, code=reason)
        self.reason = reason
        self.retry_after_s = max(1.0, retry_after_s)


class RateLimited(Refused):
    """Reasons: requests_per_minute, tokens_per_minute. `headers` say what the key has left."""

    status = 429
    kind = "rate_limit_error"
    is_of_request = True

    def __init__(self, message: str, *, reason: str, retry_after_s: float, headers: Mapping[str, str]) -> None:
        super().__init__(message, reason=reason, retry_after_s=retry_after_s)
        self.headers = headers


class Overloaded(Refused):
    """Reasons: queue_full, queue_timeout, overload, workers_overloaded, draining, body_memory, body_reader."""

    status = 503
    kind = "overloaded_error"


class PoisonedPrompt(Refused):
    """Reason: poisoned_prompt."""

    status = 503
    kind = "service_unavailable_error"


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
        self.is_of_request = cause in _OF_REQUEST and self.status != LOOP
        self.body = body
        self.retry_after_s = retry_after_s
        self.is_of_pair = False  # a P that waits for its D was late: nobody knows which of them hangs

    @property
    def is_openai_error(self) -> bool:
        """Whether the body may go to the client: the engine's own error about the request, not an error of a proxy.

        What an engine says of itself (5xx) stays inside, as it may name other workers.
        """
        if self.cause not in _OF_REQUEST:
            return False
        try:
            return "error" in msgspec.json.decode(self.body.decode(), type=dict[str, msgspec.Raw])
        except UNREADABLE:
            return False


def refusal(status: int, body: bytes, *, worker: str, phase: Phase, retry_after_s: float = 0.0) -> LegError:
    body = _in_openais_shape(body)
    cause = Cause.SERVER if phase is Phase.HEADERS else Cause.ERROR_EVENT
    seen: int | None = None
    if status in OVERLOAD:
        cause, seen = Cause.OVERLOADED, status
    elif 400 <= status < 500 or status == LOOP:
        lacks = _lacks(body) if status == 404 and phase is Phase.HEADERS else None
        cause, seen = lacks or Cause.REQUEST, status
    message = f"the worker answered {status}"
    return LegError(
        message, worker=worker, phase=phase, cause=cause, status=seen, body=body, retry_after_s=retry_after_s
    )


def _in_openais_shape(body: bytes) -> bytes:
    """SGLang's and TensorRT-LLM's errors lack the member `error` around them."""
    try:
        flat = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except UNREADABLE:
        return body
    if flat.pop("object", None) != msgspec.Raw(b'"error"') or "message" not in flat:
        return body
    return msgspec.json.encode({"error": flat})


def _lacks(body: bytes) -> Cause | None:
    """What a 404 says that is not there, in vLLM's shape or in OpenAI's; None: something else than these."""
    try:
        error = msgspec.json.decode(body, type=_Words).error
    except UNREADABLE:
        return None
    if isinstance(error, str):
        return None
    if error.param == "model" or error.code == "model_not_found" or _NO_MODEL.match(error.message) is not None:
        return Cause.UNKNOWN_MODEL
    return Cause.UNKNOWN_RESPONSE if error.param in _RESPONSE_PARAMS else None


def comes_back(exc: PPDError) -> dict[str, str]:
    """The headers that tell a client why it was refused, and in how many seconds to come back.

    OpenAI's and Anthropic's libraries repeat what fails with a 5xx, unless `x-should-retry` says otherwise.
    """
    if exc.code == WORKERS_LOST:
        return {"X-PPD-Refused": WORKERS_LOST, "x-should-retry": "false"}
    if isinstance(exc, Refused):
        limits = exc.headers if isinstance(exc, RateLimited) else {}
        headers = {"X-PPD-Refused": exc.reason, "Retry-After": str(math.ceil(exc.retry_after_s)), **limits}
        return headers | ({"x-should-retry": "false"} if isinstance(exc, PoisonedPrompt) else {})
    return {"X-PPD-Refused": "no_worker", "Retry-After": "1"} if isinstance(exc, NoWorkerError) else {}


def answer_body(exc: PPDError, path: str) -> bytes:
    """The error as a client of this path expects it: on Messages in Anthropic's shape, elsewhere in OpenAI's.

    A worker's own words where they are about the request.
    """
    own = exc.body if isinstance(exc, LegError) and exc.is_openai_error else None
    if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        return _anthropic_body(exc, own)
    return own or error_body(exc.message, exc.kind, exc.code or exc.status, exc.param)


class _Message(msgspec.Struct):
    message: str = ""
    param: str | None = None
    code: str | int | None = None


class _Words(msgspec.Struct):
    """A worker's error, in any shape that engines give it."""

    error: _Message | str = ""
    type: str = ""


def _anthropic_body(exc: PPDError, own: bytes | None) -> bytes:
    """Engines refuse bodies that they cannot read in OpenAI's shape, on Messages too."""
    message = exc.message
    if own is not None:
        try:
            words = msgspec.json.decode(own, type=_Words)
        except (msgspec.DecodeError, RecursionError):
            words = _Words()
        if words.type == "error":
            return own
        message = words.error if isinstance(words.error, str) else words.error.message or message
    kind = _ANTHROPIC_KINDS.get(exc.status, "invalid_request_error" if exc.status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def without_frames(exc: BaseException) -> None:
    """Takes the tracebacks off an error that has been handled, and off those before it.

    A frame that it passed may hold the error, and holds the request: only the garbage collector would free both, with
    all bodies that have gathered by then at once, and each large one takes 15 ms.
    """
    one: BaseException | None = exc
    freed = set[int]()
    while one is not None and id(one) not in freed:  # `raise x from x` makes a ring
        freed.add(id(one))
        one.__traceback__ = None
        one = one.__cause__ or one.__context__


def error_body(message: str, kind: str, code: str | int | None, param: str | None = None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
