# /// script
# requires-python = ">=3.11"
# dependencies = ["smolagents[openai]==1.26.0", "openai==3.54.0"]
# ///
"""smolagents: an agent that calls tools, for a few steps."""

import json
import sys

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

ASKED = json.loads(sys.argv[1])


@tool
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name
    """
    return "sunny"


model = OpenAIModel("sim", api_base=f"{ASKED['url']}/v1", api_key=ASKED["key"], max_tokens=200)
agent = ToolCallingAgent(
    tools=[weather], model=model, max_steps=3, instructions=ASKED["system"], verbosity_level=LogLevel.OFF
)
agent.run(ASKED["words"][1])
print(json.dumps({}))
