"""The tokenizers' process: it is ended when a template does not end, and begins again."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from ppd.proxy.bodies.helper_process import HelperProcess
from ppd.proxy.errors import ConfigError, Overloaded
from ppd.proxy.telemetry.metrics import Metrics
from ppd.proxy.tokenizer.folder_names import FolderNames
from ppd.proxy.tokenizer.prompt_tokenizer import PROMPT_BYTES, WAITING, PromptTokenizer
from ppd.proxy.tokenizer.token_worker import Ask, Tokenized
from tests.proxy.tokenizer.test_prompt_tokenizer import counted
from tests.proxy.tokenizer.tokenizer_folders import LOOPING, REFUSING, write_tokenizer
from tests.support.requests import CHAT, parse, user

PLENTY_S = 60.0


@asynccontextmanager
async def process() -> AsyncIterator[HelperProcess]:
    helper = HelperProcess("ppd.proxy.tokenizer.token_worker", "the tokenizer")
    try:
        yield helper
    finally:
        await helper.close()


async def ask(helper: HelperProcess, folder: Path, limit_s: float = PLENTY_S) -> Tokenized:
    members = json.dumps({"messages": [user("hi")]}).encode()
    question = msgspec.msgpack.encode(Ask(str(folder), CHAT, members))
    answer, _ = await helper.ask("tokens", question, None, limit_s)
    return msgspec.msgpack.decode(answer, type=Tokenized)


async def test_a_template_that_does_not_end_ends_its_process_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, looping, refusing = (
        write_tokenizer(tmp_path / "good"),
        write_tokenizer(tmp_path / "looping", LOOPING),
        write_tokenizer(tmp_path / "refusing", REFUSING),
    )
    async with process() as helper:
        first = await ask(helper, good)
        assert first.ids
        assert (await ask(helper, refusing)).why == "refused"
        with caplog.at_level(logging.ERROR), pytest.raises(Overloaded):
            await ask(helper, looping, 0.3)
        assert caplog.messages == ["the process of the tokenizer failed: TimeoutError"]
        assert await ask(helper, good) == first
        assert helper.asked == 0


async def test_a_process_that_is_at_work_ends_with_the_proxy(tmp_path: Path) -> None:
    async with process() as helper:
        asked = asyncio.create_task(ask(helper, write_tokenizer(tmp_path, LOOPING)))
        while (begun := helper._process) is None:
            await asyncio.sleep(0.001)
    assert begun.returncode is not None
    with pytest.raises(asyncio.CancelledError):
        await asked


async def test_a_template_that_does_not_end_does_not_outlive_the_proxy_for_long(tmp_path: Path) -> None:
    question = msgspec.msgpack.encode(Ask(str(write_tokenizer(tmp_path, LOOPING)), CHAT, b'{"messages": []}'))
    program = f"from ppd.proxy.tokenizer import token_worker as w; w.ALONE_S = 1; w._tokens({question!r}, None)"
    orphan = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await orphan.wait() == -signal.SIGALRM


async def test_a_prompt_of_the_largest_size_is_tokenised(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer(FolderNames(str(write_tokenizer(tmp_path))), Metrics(), PLENTY_S)
    try:
        line = "A line, and the same again. " * 40 + "\\n"
        lines = (PROMPT_BYTES - 200) // len(line)
        found = await tokenizer.tokens(parse(CHAT, [user(line.replace("\\n", "\n") * lines)]))
        assert found is not None
        assert found.count > lines * (len(line) - 1)
    finally:
        await tokenizer.close()


async def test_a_burst_is_counted_as_far_as_it_is_in_time_and_nothing_of_it_stays(tmp_path: Path) -> None:
    helper, metrics = HelperProcess("ppd.proxy.tokenizer.token_worker", "the tokenizer"), Metrics()
    folders = FolderNames(str(write_tokenizer(tmp_path)))
    patient, hasty = (PromptTokenizer(folders, metrics, wait_s, helper=helper) for wait_s in (PLENTY_S, 0.005))
    try:
        await patient.open()
        most = 0

        async def turn(number: int) -> bool:
            nonlocal most
            asked = asyncio.create_task(hasty.tokens(parse(CHAT, [user(f"{number} of many. " * 200)])))
            await asyncio.sleep(0)
            most = max(most, helper.asked)
            return await asked is not None

        known = await asyncio.gather(*map(turn, range(256)))
        assert 0 < most <= WAITING
        results = counted(metrics)
        assert results["busy"] > 256 / 2
        assert (sum(results.values()), results.get("known", 0)) == (256, sum(known))
        assert results.keys() <= {"known", "late", "busy"}
        async with asyncio.timeout(PLENTY_S):
            while helper.asked:  # what was late is done, or left out
                await asyncio.sleep(0.005)
        assert await patient.tokens(parse()) is not None
        assert helper.asked == 0
    finally:
        await patient.close()


async def test_files_that_cannot_be_read_are_one_error_at_the_start(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    tokenizer = PromptTokenizer(FolderNames(str(folder)), Metrics(), PLENTY_S)
    try:
        with pytest.raises(ConfigError, match=r"^tokenizer: .* cannot be read: ") as raised:
            await tokenizer.open()
        assert "\n" not in raised.value.message
    finally:
        await tokenizer.close()
