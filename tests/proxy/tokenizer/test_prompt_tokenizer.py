from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ppd.proxy.bodies.shared_bytes import SharedBytes
from ppd.proxy.errors import Overloaded
from ppd.proxy.kv_events.block_tokens import packed
from ppd.proxy.openai.request import Request
from ppd.proxy.telemetry.metrics import Metrics
from ppd.proxy.tokenizer.folder_names import FolderNames
from ppd.proxy.tokenizer.prompt_tokenizer import PROMPT_BYTES, WAITING, PromptTokenizer
from ppd.proxy.tokenizer.token_worker import Ask, tokenized
from tests.proxy.tokenizer.tokenizer_folders import write_tokenizer
from tests.support.requests import CHAT, COMPLETIONS, MESSAGES, RESPONSES, parse, user


class InThisProcess:
    """The helper's task, done here; `waits`: until then it does nothing."""

    def __init__(self, waits: asyncio.Event | None = None, *, fails: bool = False) -> None:
        self.asked = 0
        self.waits = waits
        self.fails = fails

    async def ask(
        self, name: str, arguments: bytes, shared: SharedBytes | None = None, limit_s: float | None = None
    ) -> tuple[bytes, SharedBytes | None]:
        assert name == "tokens"
        self.asked += 1
        if self.fails:
            raise Overloaded("ended", reason="body_reader", retry_after_s=1.0)
        if self.waits is not None:
            await self.waits.wait()
        self.asked -= 1
        return msgspec.msgpack.encode(tokenized(msgspec.msgpack.decode(arguments, type=Ask))), None

    async def close(self) -> None: ...


def tokenizer(folder: Path, helper: Any = None, wait_s: float = 20.0) -> tuple[PromptTokenizer, Metrics]:
    metrics = Metrics()
    return PromptTokenizer(FolderNames(str(folder)), metrics, wait_s, helper=helper or InThisProcess()), metrics


def counted(metrics: Metrics) -> dict[str, float]:
    found = next(family for family in metrics.registry.collect() if family.name == "ppd_prompts_tokenized")
    return {one.labels["result"]: one.value for one in found.samples if one.name.endswith("_total")}


@pytest.mark.parametrize(
    ("request_", "result"),
    [
        (parse(), "known"),
        (parse(MESSAGES, max_tokens=5), "known"),
        (parse(RESPONSES), "known"),
        (parse(COMPLETIONS, "Once"), "known"),
        (parse(COMPLETIONS, [5, 6]), "known"),
        (parse(CHAT, [{"role": "assistant", "tool_calls": [{"id": "c"}]}]), "refused"),
        (parse(COMPLETIONS, ["one", "two"]), "parts"),
        (parse(COMPLETIONS, "Once", suffix="end"), "options"),
        (parse(CHAT, [user([{"type": "image_url", "image_url": {"url": "x"}}])]), "parts"),
        (parse(CHAT, [user([{"type": "made_up"}])]), "parts"),
        (parse(CHAT, [user("hi")], chat_template="{{ 1 }}"), "options"),
        (parse(RESPONSES, previous_response_id="r"), "stored"),
        (parse(CHAT, [user("x" * PROMPT_BYTES)]), "too_large"),
    ],
)
async def test_what_becomes_of_a_prompt_is_counted(tmp_path: Path, request_: Request, result: str) -> None:
    asked, metrics = tokenizer(write_tokenizer(tmp_path))
    found = await asked.tokens(request_)
    assert (found is not None) is (result == "known")
    assert counted(metrics) == {result: 1}


async def test_a_prompts_tokens_and_its_salt(tmp_path: Path) -> None:
    asked, _ = tokenizer(write_tokenizer(tmp_path))
    found = await asked.tokens(parse(CHAT, [user("hi")], cache_salt="ann"))
    assert found is not None
    text = "user\nhi"
    assert found.ids[4 : 4 * (1 + len(text))] == packed([ord(letter) for letter in text])
    assert (found.salt, found.count) == ("ann", 1 + len(text) + 2 + 1 + len("assistant\n"))
    assert found.ids == tokenized(Ask(str(tmp_path), CHAT, json.dumps({"messages": [user("hi")]}).encode())).ids


async def test_a_model_without_a_folder_is_not_tokenised(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "other")
    asked, metrics = tokenizer(tmp_path)
    assert await asked.tokens(parse()) is None
    assert counted(metrics) == {}


async def test_a_turn_does_not_wait_for_what_is_late_nor_queues_for_ever(tmp_path: Path) -> None:
    helper = InThisProcess(asyncio.Event())
    asked, metrics = tokenizer(write_tokenizer(tmp_path), helper, wait_s=0.001)
    assert await asked.tokens(parse()) is None
    helper.asked = WAITING
    assert await asked.tokens(parse()) is None
    helper.asked, helper.fails = 0, True
    assert await asked.tokens(parse()) is None
    assert counted(metrics) == {"late": 1, "busy": 1, "failed": 1}
