# /// script
# requires-python = ">=3.11"
# dependencies = ["litellm==1.106.2", "mcp==2.3.0"]  # it needs mcp wherever tools are given
# ///
"""LiteLLM, as a client of OpenAI's API and of Anthropic's: a conversation with tools, and its errors."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks GitHub for prices

import litellm

ASKED = json.loads(sys.argv[1])
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


def chat(api, key=ASKED["key"], url=ASKED["url"], model="sim", **members):
    base = f"{url}/v1" if api == "openai" else url
    request = {
        "messages": ASKED["opening"],
        "max_tokens": 24,
        "stream": True,
        "num_retries": 0,
        "max_retries": 0,
    } | members
    chunks = list(litellm.completion(model=f"{api}/{model}", api_base=base, api_key=key, **request))
    return litellm.stream_chunk_builder(chunks, messages=request["messages"])


def conversation(api):
    messages, texts = list(ASKED["opening"]), []
    for words in ASKED["words"]:
        said = chat(api, messages=messages, tools=TOOLS).choices[0].message
        texts.append(said.content or "")
        messages.append({"role": "assistant", "content": said.content or ""})
        if said.tool_calls:
            messages[-1]["tool_calls"] = [call.model_dump() for call in said.tool_calls]
        for call in said.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        messages.append({"role": "user", "content": words})
    return {"texts": texts}


def raised(**how):
    try:
        chat("openai", **how)
    except Exception as exc:
        return [kind.__name__ for kind in type(exc).__mro__]


litellm.suppress_debug_info = True
errors = {name: raised(**how) for name, how in ASKED["errors"].items()}
print(json.dumps({"chat": conversation("openai"), "messages": conversation("anthropic"), "errors": errors}))
