# /// script
# requires-python = ">=3.11"
# dependencies = ["langchain-openai==1.7.3"]
# ///
"""LangChain's ChatOpenAI: a conversation with tools, and its errors."""

import json
import sys

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

ASKED = json.loads(sys.argv[1])


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return "sunny"


def model(key=ASKED["key"], url=ASKED["url"], model="sim", max_tokens=24):
    return ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key=key, max_tokens=max_tokens, max_retries=0, stream_usage=True
    )


def conversation():
    bound = model().bind_tools([weather])
    messages, texts, cached = [HumanMessage(ASKED["opening"][0]["content"])], [], []
    for words in ASKED["words"]:
        said = None
        for chunk in bound.stream(messages):
            said = chunk if said is None else said + chunk
        texts.append(said.text)
        cached.append(said.usage_metadata["input_token_details"]["cache_read"])
        messages.append(AIMessage(content=said.content, tool_calls=said.tool_calls))
        messages += [ToolMessage("sunny", tool_call_id=call["id"]) for call in said.tool_calls]
        messages.append(HumanMessage(words))
    return {"texts": texts, "cached": cached}


def raised(**how):
    try:
        for _ in model(**how).stream(ASKED["opening"][0]["content"]):
            pass
    except Exception as exc:
        return [kind.__name__ for kind in type(exc).__mro__]


errors = {name: raised(**how) for name, how in ASKED["errors"].items()}
print(json.dumps({"chat": conversation(), "errors": errors}))
