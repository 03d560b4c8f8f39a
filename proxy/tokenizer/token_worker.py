"""What the tokenizers' process does: it renders one request's prompt, and tokenises it."""

from __future__ import annotations

import signal
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from ..bodies.helper_process import serve
from ..errors import ConfigError
from ..kv_events.block_tokens import packed
from ..openai.request import Endpoint
from .conversation import Conversation, Unrenderable, chat_conversation
from .other_apis import messages_conversation, responses_conversation
from .piecewise import Piecewise
from .tokenizer_folder import TokenizerFolder

ALONE_S = 180  # then it ends itself: a template may still loop when the proxy is gone
FOLDERS = 64  # held at once; each takes some 100 MB


class Ask(msgspec.Struct, frozen=True):
    """members: those of the body that the prompt is made of, as JSON; empty: only the folder is to be read."""

    folder: str
    endpoint: Endpoint = Endpoint.CHAT
    members: bytes = b""
    salt: str = ""  # of the prompt's KV: what is kept of it serves only prompts with the same


class Tokenized(msgspec.Struct, frozen=True):
    ids: bytes = b""  # as `packed`
    why: str = ""  # there are none: one word
    error: str = ""  # the folder can't be used


def main(fd: int) -> None:
    serve(fd, {"tokens": _tokens})


def _tokens(arguments: bytes, _: memoryview) -> tuple[bytes, bytes | None]:
    signal.alarm(ALONE_S)
    found = tokenized(msgspec.msgpack.decode(arguments, type=Ask))
    signal.alarm(0)
    return msgspec.msgpack.encode(found), None


def tokenized(ask: Ask) -> Tokenized:
    """Whatever the body and the folder hold."""
    try:
        folder, texts = _loaded(ask.folder)
    except ConfigError as exc:
        return Tokenized(why="folder", error=exc.message)
    if not ask.members:
        return Tokenized()
    try:
        body = msgspec.json.decode(ask.members, type=dict[str, Any])
        if ask.endpoint is Endpoint.COMPLETIONS:
            return Tokenized(_raw_prompt(body, texts, ask.salt))
        talk = _conversation(ask.endpoint, body, folder)
        text = talk.render(folder.template)
        return Tokenized(texts.tokens(text, ask.salt, add_special_tokens=talk.add_special_tokens))
    except Unrenderable as exc:
        return Tokenized(why=exc.why)
    except Exception:  # a body of any shape, and a template's code: the engine may refuse it too
        return Tokenized(why="refused")


@lru_cache(FOLDERS)
def _loaded(folder: str) -> tuple[TokenizerFolder, Piecewise]:
    """ConfigError says what is wrong with it."""
    loaded = TokenizerFolder.load(Path(folder))
    return loaded, Piecewise(loaded)


def _conversation(endpoint: Endpoint, body: dict[str, Any], folder: TokenizerFolder) -> Conversation:
    match endpoint:
        case Endpoint.MESSAGES:
            return messages_conversation(body, folder.template)
        case Endpoint.RESPONSES:
            return responses_conversation(body)
        case _:
            return chat_conversation(body)


def _raw_prompt(body: dict[str, Any], texts: Piecewise, salt: str) -> bytes:
    prompt = body["prompt"]
    if any(body.get(name) is not None for name in ("suffix", "truncate_prompt_tokens", "prompt_embeds")):
        raise Unrenderable("options")
    if isinstance(prompt, str):
        return texts.tokens(prompt, salt, add_special_tokens=body.get("add_special_tokens", True))
    if prompt and all(isinstance(one, int) and not isinstance(one, bool) for one in prompt):
        return packed(prompt)
    raise Unrenderable("parts")
