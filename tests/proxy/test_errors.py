"""What an error keeps once it has been handled."""

from __future__ import annotations

import pytest

from ppd.proxy.errors import (
    LoopDetected,
    NotFound,
    NoWorkerError,
    Overloaded,
    PPDError,
    RateLimited,
    RequestError,
    refusal,
    without_frames,
)
from ppd.proxy.failures import Cause, Phase


def caught(*, in_a_ring: bool) -> list[BaseException]:
    """An error and the one before it, each with the frames that it has passed."""
    try:
        try:
            raise ValueError
        except ValueError as before:
            raise KeyError from before
    except KeyError as exc:
        cause = exc.__cause__
        assert cause is not None
        if in_a_ring:
            cause.__cause__ = exc
        return [exc, cause]


def test_an_error_and_those_before_it_lose_their_frames() -> None:
    errors = caught(in_a_ring=False)
    assert all(one.__traceback__ for one in errors)
    without_frames(errors[0])
    assert [one.__traceback__ for one in errors] == [None, None]


def test_errors_that_name_each_other_hang_nothing() -> None:
    """As after `raise error from error`."""
    errors = caught(in_a_ring=True)
    without_frames(errors[0])
    assert [one.__traceback__ for one in errors] == [None, None]
    errors[1].__cause__ = None


FLAT = b'{"object":"error","message":"too long","type":"BadRequestError","param":null,"code":400}'
NO_MODEL = (
    b'{"object":"error","message":"The model `m` does not exist.","type":"NotFoundError","param":"model","code":404}'
)


NO_RESPONSE = b'{"error":{"message":"Response with id \'r\' not found.","type":"x","param":"response_id","code":404}}'


@pytest.mark.parametrize(
    ("status", "given", "told", "cause"),
    [
        (400, FLAT, b'{"error":' + FLAT.replace(b'"object":"error",', b"") + b"}", Cause.REQUEST),
        (404, NO_MODEL, b'{"error":' + NO_MODEL.replace(b'"object":"error",', b"") + b"}", Cause.UNKNOWN_MODEL),
        (404, NO_RESPONSE, NO_RESPONSE, Cause.UNKNOWN_RESPONSE),
        (400, NO_RESPONSE, NO_RESPONSE, Cause.REQUEST),
        (400, b'{"object":"error"}', b'{"object":"error"}', Cause.REQUEST),
        (400, b'{"error":{"message":"m"},"object":"x"}', b'{"error":{"message":"m"},"object":"x"}', Cause.REQUEST),
        (400, b"\xff[[", b"\xff[[", Cause.REQUEST),
    ],
)
def test_errors_of_other_engines_are_told_in_openais_shape(
    status: int, given: bytes, told: bytes, cause: Cause
) -> None:
    found = refusal(status, given, worker="w", phase=Phase.HEADERS)
    assert (found.body, found.cause) == (told, cause)


def by_worker(status: int, body: bytes = b"") -> PPDError:
    return refusal(status, body, worker="D1", phase=Phase.HEADERS)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RequestError("m"), True),
        (NotFound("m"), True),
        (RateLimited("m", reason="tokens_per_minute", retry_after_s=1.0, headers={}), True),
        (by_worker(400), True),
        (by_worker(404, NO_MODEL), True),
        (by_worker(404, NO_RESPONSE), True),
        (by_worker(429), False),
        (by_worker(503), False),
        (by_worker(500), False),
        (by_worker(508), False),
        (Overloaded("m", reason="queue_full", retry_after_s=1.0), False),
        (NoWorkerError("m"), False),
        (LoopDetected("m"), False),
        (PPDError("m"), False),
    ],
)
def test_which_errors_are_the_requests_own_fault(error: PPDError, expected: bool) -> None:
    assert error.is_of_request is expected
