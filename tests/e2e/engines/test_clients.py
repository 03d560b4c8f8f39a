"""The official OpenAI client understands the engine's answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from ppd.proxy.fleet.worker import Role
from ppd.servers.sim.core.config import SimConfig
from ppd.servers.sim.launch import running_engine


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    async with running_engine(SimConfig(role=Role.REPLICA, model="m", api_key="secret")) as engine:
        base_url = f"http://{engine.address}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="secret", max_retries=0) as client:
            yield client


async def test_chat(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    whole = await client.chat.completions.create(model="m", messages=messages)
    stream = await client.chat.completions.create(
        model="m", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_responses(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(model="m", input="hi", max_output_tokens=40)
    stream = await client.responses.create(model="m", input="hi", max_output_tokens=40, stream=True)
    text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
    assert text == whole.output_text != ""


async def test_completions_embeddings_and_models(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model="m", prompt="once", max_tokens=8)
    assert len(whole.choices[0].text) == 8
    embedded = await client.embeddings.create(model="m", input="once", encoding_format="float")
    assert len(embedded.data[0].embedding) == 16
    assert [model.id async for model in client.models.list()] == ["m"]


async def test_errors_are_the_clients_own(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="nope", messages=messages)
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="m", messages=messages, max_tokens=10**6)
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
