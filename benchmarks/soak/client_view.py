"""What a client reads from an answer's bytes: its texts, how it ended, and whether it reports an error. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from ppd.proxy.openai.request import Endpoint

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
