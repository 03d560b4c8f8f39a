# /// script
# requires-python = ">=3.11"
# dependencies = ["anthropic==2.12.0"]
# ///
"""Anthropic's client: a conversation with tools, a count of tokens, and its errors."""

import json
import sys

import anthropic

ASKED = json.loads(sys.argv[1])
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "weather", "input_schema": SCHEMA}]


def client(key, url=ASKED["url"]):
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


def chat(key=ASKED["key"], url=ASKED["url"], **members):
    request = {"model": "sim", "messages": ASKED["opening"], "max_tokens": 24} | members
    with client(key, url).messages.stream(**request) as stream:
        for _ in stream:
            pass
        return stream.get_final_message()


def conversation():
    messages, texts, cached = list(ASKED["opening"]), [], []
    for words in ASKED["words"]:
        said = chat(messages=messages, tools=TOOLS)
        texts.append("".join(block.text for block in said.content if block.type == "text"))
        cached.append(said.usage.cache_read_input_tokens)
        messages.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in said.content]}
        )
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
            for block in said.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": words}]})
    return {"texts": texts, "cached": cached}


def raised(**how):
    try:
        chat(**how)
    except Exception as exc:
        told = getattr(exc, "body", None) or {}
        return [kind.__name__ for kind in type(exc).__mro__] + [told.get("type"), told.get("error", {}).get("type")]


errors = {name: raised(**how) for name, how in ASKED["errors"].items()}
count = client(ASKED["key"]).messages.count_tokens(model="sim", messages=ASKED["opening"]).input_tokens
print(json.dumps({"chat": conversation(), "count": count, "errors": errors}))
