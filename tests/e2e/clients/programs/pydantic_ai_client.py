# /// script
# requires-python = ">=3.11"
# dependencies = ["pydantic-ai-slim[openai,anthropic]==2.68.0", "openai==3.54.0", "anthropic==2.12.0"]
# ///
"""Pydantic AI: a conversation with a tool, over chat completions and over Anthropic's Messages."""

import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

ASKED = json.loads(sys.argv[1])


def conversation(model):
    agent = Agent(model, system_prompt=ASKED["system"], model_settings={"max_tokens": 200}, retries=3)

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather in a city."""
        return "sunny"

    history = []
    for words in [ASKED["opening"][0]["content"], *ASKED["words"]]:
        history = agent.run_sync(words, message_history=history).all_messages()


openai = OpenAIProvider(base_url=f"{ASKED['url']}/v1", api_key=ASKED["key"])
conversation(OpenAIChatModel("sim", provider=openai))
conversation(AnthropicModel("sim", provider=AnthropicProvider(base_url=ASKED["url"], api_key=ASKED["key"])))
print(json.dumps({}))
