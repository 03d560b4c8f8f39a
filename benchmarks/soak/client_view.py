"""What a client reads from an answer's bytes, and whether that is right. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ppd.proxy.openai.request import Endpoint

from .records import ClientOutcome
from .workload import Move

_ABORT = "abort"  # vLLM's finish reason for an answer that the engine gave up
_DONE = b"[DONE]"


@dataclass(slots=True)
class ClientView:
    """One answer as far as it has come: `feed` it a stream's bytes, or `read_whole` a body."""

    endpoint: Endpoint
    texts: dict[int, str] = field(default_factory=dict)  # by choice
    finishes: set[str] = field(default_factory=set)  # every reason that a choice ended with
    ended: bool = False  # the protocol's end marker has come
    error: str = ""  # the code or type of an error, not its message
    events_after_end: int = 0  # or after an error
    _rest: bytes = b""

    def feed(self, chunk: bytes) -> int:
        """Returns how many events brought text."""
        *events, self._rest = (self._rest + chunk).split(b"\n\n")
        return sum(map(self._read_event, events))

    def read_whole(self, body: bytes) -> None:
        payload = _json(body)
        if payload is None:
            self.error = "not_json"
        elif payload.get("error") is not None:
            self.error = error_name(payload)
        else:
            self._read_answer(payload)
            self.ended = bool(self.texts)

    @property
    def rest(self) -> bytes:
        """An unfinished event at the end of a stream; b"" for a clean end."""
        return self._rest.strip()

    def _read_event(self, event: bytes) -> bool:
        lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
        if not lines:
            return False
        data = b"\n".join(lines)
        if data == _DONE:
            self.ended = True
            return False
        self.events_after_end += bool(self.error or self.ended)
        payload = _json(data)
        if payload is None:
            self.error = self.error or "not_json"
            return False
        if payload.get("error") is not None or payload.get("type") in ("error", "response.failed"):
            self.error = self.error or error_name(payload)
            return False
        return self._read_chunk(payload)

    def _read_chunk(self, payload: dict[str, Any]) -> bool:
        match self.endpoint:
            case Endpoint.RESPONSES:
                if payload["type"] == "response.output_text.delta":
                    return self._add(0, payload["delta"])
                self.ended |= payload["type"] in ("response.completed", "response.incomplete")
                return False
            case Endpoint.MESSAGES:
                self.ended |= payload["type"] == "message_stop"
                if payload["type"] == "message_delta":
                    self._stopped(payload["delta"])
                is_text = payload["type"] == "content_block_delta"
                return is_text and self._add(0, payload["delta"].get("text"))
            case _:
                return sum(self._take_choice(choice) for choice in payload.get("choices", ())) > 0

    def _take_choice(self, choice: dict[str, Any]) -> bool:
        if reason := choice.get("finish_reason"):
            self.finishes.add(reason)
        text = choice.get("text") if self.endpoint is Endpoint.COMPLETIONS else choice["delta"].get("content")
        return self._add(choice["index"], text)

    def _stopped(self, message: dict[str, Any]) -> None:
        self.finishes.add(message["stop_reason"] or "abort")  # as vLLM tells it

    def _add(self, choice: int, text: str | None) -> bool:
        self.texts[choice] = self.texts.get(choice, "") + (text or "")
        return bool(text)

    def _read_answer(self, payload: dict[str, Any]) -> None:
        match self.endpoint:
            case Endpoint.RESPONSES:
                parts = [part for item in payload["output"] for part in item["content"]]
                self._add(0, "".join(part["text"] for part in parts))
            case Endpoint.MESSAGES:
                self._stopped(payload)
                self._add(0, "".join(part["text"] for part in payload["content"]))
            case _:
                for choice in payload["choices"]:
                    self.finishes.add(choice["finish_reason"])
                    is_chat = self.endpoint is Endpoint.CHAT
                    self._add(choice["index"], choice["message"]["content"] if is_chat else choice["text"])


def error_name(payload: dict[str, Any]) -> str:
    error = payload.get("error")
    if not isinstance(error, dict):
        return str(payload.get("code") or payload.get("type") or "error")[:40]
    return "/".join(str(error[name])[:40] for name in ("type", "code") if error.get(name))


def _json(data: bytes) -> dict[str, Any] | None:
    try:
        payload = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return payload if isinstance(payload, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reception:
    """How the HTTP exchange went."""

    status: int  # 0: no response
    left: bool = False  # the client closed the connection on purpose
    lost: bool = False  # the connection ended in the middle of an answer


def verify(
    view: ClientView, reception: Reception, expected: Mapping[int, str] | None, move: Move
) -> tuple[ClientOutcome, str]:
    """Outcome and detail. `expected`: the right texts by choice; None where there can be none.

    1. A client that left: the text until then must be the beginning of the right text.
    2. No response, or a connection that ended in the middle of one: always a defect.
    3. An error status is right for a request that no engine can serve; otherwise it is a failure.
    4. Text that is not the beginning of the right text is wrong, whatever else happened.
    5. An incomplete 200 must say so: by an error event, after which nothing follows, or by the engine's finish reason
       `abort`.
    6. The rest is completed if all of the right text came.
    """
    if reception.left:
        difference = _difference(view, expected)
        return (ClientOutcome.WRONG, difference) if difference else (ClientOutcome.LEFT, "")
    if reception.status == 0:
        return ClientOutcome.UNANSWERED, ""
    if reception.status != 200:
        return _refusal(view, reception.status, move)
    if expected is None:
        return ClientOutcome.WRONG, "an answer to a request that has none"
    if difference := _difference(view, expected):
        return ClientOutcome.WRONG, difference
    if view.events_after_end:
        return ClientOutcome.UNMARKED, "events after the end"
    if view.error:
        return (ClientOutcome.UNMARKED, "an end after an error") if view.ended else (ClientOutcome.BROKEN, view.error)
    if reception.lost:
        return ClientOutcome.UNANSWERED, "the connection ended"
    if _ABORT in view.finishes:
        return ClientOutcome.BROKEN, _ABORT
    if not view.ended or view.rest:
        return ClientOutcome.UNMARKED, "no end"
    if view.texts != expected:
        return ClientOutcome.WRONG, "an end before all of the text"
    return ClientOutcome.COMPLETED, ""


def _refusal(view: ClientView, status: int, move: Move) -> tuple[ClientOutcome, str]:
    if move is Move.IMPOSSIBLE and status == 400:
        return ClientOutcome.REJECTED, ""
    return ClientOutcome.TIMED_OUT if status == 504 else ClientOutcome.FAILED, view.error or "no error body"


def _difference(view: ClientView, expected: Mapping[int, str] | None) -> str:
    """Where the received text departs from the right text; empty if it is the beginning of it."""
    for choice, text in view.texts.items():
        right = (expected or {}).get(choice, "")
        if not right.startswith(text):
            at = next((at for at, (a, b) in enumerate(zip(text, right, strict=False)) if a != b), len(right))
            return f"choice {choice} from character {at} of {len(right)} on"
    return ""
