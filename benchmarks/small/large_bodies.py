"""The bodies of `stall`: merely large ones, and hostile ones of many items."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

MIB = 1024 * 1024
ITEMS = 4_500_000
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NONE = "none"
ANSWER_MB = '"answer_mb":'  # the worker's answer is to have so many megabytes


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    path: str
    body: Callable[[], bytes]
    content_type: str = "application/json"


def chat(messages: str, more: str = "") -> bytes:
    return large('"messages":[' + messages + "]" + more)


def user(content: str) -> str:
    return '{"role":"user","content":' + content + "}"


def many(item: str, count: int = ITEMS) -> str:
    return ",".join([item] * count)


def text(size: int) -> str:
    """As JSON: words, quotation marks and line ends."""
    line = 'def walk(tree): return "the quick brown fox", tree.left\n'
    return json.dumps((line * (size // len(line) + 1))[:size])


def ids(count: int) -> str:
    chosen = random.Random(0)
    return "[" + ",".join(str(chosen.randrange(128_000)) for _ in range(count)) + "]"


def completion(prompt: str) -> bytes:
    return large('"prompt":' + prompt)


def large(members: str) -> bytes:
    return ('{"model":"large",' + members + "}").encode()


def upload(parts: int, size: int) -> bytes:
    part = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + b"x" * size + b"\r\n"
    return part * parts + b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nlarge\r\n--b--\r\n'


FORM = "multipart/form-data; boundary=b"

KINDS = (
    Kind(NONE, CHAT, lambda: b""),
    # merely large
    Kind("text of 600 KB", CHAT, lambda: chat(user(text(600_000)))),
    Kind("CJK of 600 KB", CHAT, lambda: chat(user(json.dumps("漢字" * 100_000, ensure_ascii=False)))),
    Kind("text of 10 MB", CHAT, lambda: chat(user(text(10_000_000)))),
    Kind("text of 60 MB", CHAT, lambda: chat(user(text(57_000_000)))),
    Kind("5,000 messages", CHAT, lambda: chat(many(user(text(500)), 5000))),
    Kind("19,000 messages", CHAT, lambda: chat(many(user(text(3000)), 19_000))),
    Kind(
        "image of 60 MB",
        CHAT,
        lambda: chat(user('[{"type":"image_url","image_url":{"url":"' + "iVBO" * 15_000_000 + '"}}]')),
    ),
    Kind("900,000 token ids", COMPLETIONS, lambda: completion(ids(900_000))),
    Kind("prompt of 60 MB", COMPLETIONS, lambda: completion(text(57_000_000))),
    Kind("upload of 60 MB", "/v1/audio/transcriptions", lambda: upload(1, 60_000_000), FORM),
    Kind(
        "embeddings of 10 MB",
        "/v1/embeddings",
        lambda: large('"input":[' + many(text(10_000), 1000) + "]"),
    ),
    Kind("answer of 60 MB", CHAT, lambda: chat(user('"hi"'), f",{ANSWER_MB}60")),
    # hostile
    Kind("parts", CHAT, lambda: chat(user("[" + many('{"text":""}') + "]"))),
    Kind("texts as parts", CHAT, lambda: chat(user("[" + many('""', 3 * ITEMS) + "]"))),
    Kind("tool calls", CHAT, lambda: chat('{"role":"assistant","tool_calls":[' + many("{}", 3 * ITEMS) + "]}")),
    Kind("messages", CHAT, lambda: chat(many('{"role":""}'))),
    Kind("items", RESPONSES, lambda: large('"input":[' + many('{"type":"x"}') + "]")),
    Kind("tools", CHAT, lambda: chat(user('"hi"'), ',"tools":[' + many('{"type":""}') + "]")),
    Kind("numbers in a tool", CHAT, lambda: chat(user('"hi"'), ',"tools":[{"enum":[' + many("1", 6 * ITEMS) + "]}]")),
    Kind(
        "numbers in 50 parts",
        CHAT,
        lambda: chat(user("[" + many('{"type":"x","x":[' + many("1", 500_000) + "]}", 50) + "]")),
    ),
    Kind("19,000 parts", CHAT, lambda: chat(user("[" + many('{"type":"x","x":{"a":[1,2,3]}}', 19_000) + "]"))),
    Kind("many keys", CHAT, lambda: chat(user('"hi"'), "".join(f',"{at:07}":0' for at in range(ITEMS)))),
    Kind("deep nesting", CHAT, lambda: chat(user('"hi"'), ',"x":' + "[" * 29 * MIB + "]" * 29 * MIB)),
    Kind("wide nesting", CHAT, lambda: chat(user('"hi"'), ',"x":[' + many("[[[]]]", 8 * MIB) + "]")),
    Kind("escapes", CHAT, lambda: chat(user('"' + "\\u6f22" * 9_500_000 + '"'))),
    Kind("7 million token ids", COMPLETIONS, lambda: completion(ids(7_000_000))),
    Kind("lists of token ids", COMPLETIONS, lambda: completion("[" + many("[]", 4 * ITEMS) + "]")),
    Kind("a name of 60 MB", CHAT, lambda: chat(user('"hi"'), ',"prompt_cache_key":"' + "k" * 58_000_000 + '"')),
    Kind(
        "arguments of 60 MB",
        CHAT,
        lambda: chat(
            '{"role":"assistant","tool_calls":[{"function":{"arguments":"' + "\\\\\\u0020" * 7_000_000 + '"}}]}'
        ),
    ),
    Kind("parts of a form", "/v1/audio/transcriptions", lambda: upload(900_000, 1), FORM),
    Kind(
        "keys to embed",
        "/v1/embeddings",
        lambda: large(",".join(f'"{at:07}":0' for at in range(ITEMS))),
    ),
)
