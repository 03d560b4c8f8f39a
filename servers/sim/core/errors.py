"""The simulated engine's error answers, with vLLM's types and texts.

SimError
  BadRequest      400  BadRequestError
  UnknownName     404  NotFoundError: an unknown model or response
  EngineFailure   500  InternalServerError: a KV load that failed under policy `fail`, or a dead engine
  OrderedError    any  ordered by a fault
"""

from __future__ import annotations


class SimError(Exception):
    status = 500
    kind = "InternalServerError"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(SimError):
    status = 400
    kind = "BadRequestError"


class UnknownName(SimError):
    status = 404
    kind = "NotFoundError"


class EngineFailure(SimError):
    pass


class OrderedError(SimError):
    def __init__(self, status: int) -> None:
        super().__init__("Refused on request.")
        self.status = status
        self.kind = _KINDS.get(status, "BadRequestError" if status < 500 else "InternalServerError")


_KINDS = {404: "NotFoundError", 422: "UnprocessableEntityError", 429: "RateLimitError", 503: "ServiceUnavailableError"}
