# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.54.0"]
# ///
"""OpenAI's client: a conversation with tools, one of stored responses, and its errors."""

import json
import sys

import openai

ASKED = json.loads(sys.argv[1])
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


def client(key, url=ASKED["url"]):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def chat(key=ASKED["key"], url=ASKED["url"], **members):
    request = {"model": "sim", "messages": ASKED["opening"], "max_tokens": 1000} | members
    with client(key, url).chat.completions.stream(**request) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion()


def conversation():
    messages, texts, cached = list(ASKED["opening"]), [], []
    for words in ASKED["words"]:
        done = chat(messages=messages, tools=TOOLS, stream_options={"include_usage": True})
        said = done.choices[0].message
        texts.append(said.content or "")
        cached.append(done.usage.prompt_tokens_details.cached_tokens)
        messages.append(said.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        for call in said.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        messages.append({"role": "user", "content": words})
    return {"texts": texts, "cached": cached}


def responses():
    texts, previous = [], None
    for words in ASKED["words"]:
        with client(ASKED["key"]).responses.stream(
            model="sim", input=words, max_output_tokens=1000, **({"previous_response_id": previous} if previous else {})
        ) as stream:
            for _ in stream:
                pass
            done = stream.get_final_response()
        texts.append(done.output_text)
        previous = done.id
    return {"texts": texts, "read": client(ASKED["key"]).responses.retrieve(previous).output_text == texts[-1]}


def raised(**how):
    try:
        chat(**how)
    except Exception as exc:
        return [kind.__name__ for kind in type(exc).__mro__]


errors = {name: raised(**how) for name, how in ASKED["errors"].items()}
print(json.dumps({"chat": conversation(), "responses": responses(), "errors": errors}))
