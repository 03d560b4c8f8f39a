# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents==0.24.0", "openai==3.54.0"]
# ///
"""OpenAI's agents: a conversation with a tool, over chat completions and over Responses."""

import asyncio
import json
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

ASKED = json.loads(sys.argv[1])


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return "sunny"


async def conversation(kind):
    client = AsyncOpenAI(base_url=f"{ASKED['url']}/v1", api_key=ASKED["key"], max_retries=0)
    settings = ModelSettings(max_tokens=200, include_usage=True)
    model = kind(model="sim", openai_client=client)
    agent = Agent(name="Helper", instructions=ASKED["system"], model=model, tools=[weather], model_settings=settings)
    history = list(ASKED["opening"])
    for words in ASKED["words"]:
        run = Runner.run_streamed(agent, history, max_turns=4)
        async for _ in run.stream_events():
            pass
        history = [*run.to_input_list(), {"role": "user", "content": words}]


async def main():
    set_tracing_disabled(True)
    await conversation(OpenAIChatCompletionsModel)
    await conversation(OpenAIResponsesModel)


asyncio.run(main())
print(json.dumps({}))
