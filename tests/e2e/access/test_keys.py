"""Clients' keys at the proxy's door: who may ask, for what, how often, and that no key goes anywhere else."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from ppd.proxy.admission.key_file import KeyRing
from ppd.proxy.admission.keys import encode, hash_of
from ppd.proxy.admission.wrong_keys import FREE
from ppd.proxy.config import Mode
from ppd.proxy.errors import ConfigError
from ppd.servers.sim.core.fault_orders import Faults
from tests.support.credentials import bearer, client, key_of, write_keys
from tests.support.proxy import ADMIN_KEY

SAY = [{"role": "user", "content": "hi"}]
OURS = ("one", "two")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    write_keys(path, *map(client, OURS))
    return path


def write(file: Path, text: str | None) -> None:
    if text is None:
        file.unlink()
    else:
        file.write_text(text)


async def head_only(fleet: Any, head: str) -> bytes:
    """The status line that a request gets whose body never comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(fleet.base_url.rpartition(":")[2]))
    try:
        writer.write(f"POST {head}\r\nHost: x\r\nContent-Length: 1000\r\n\r\n".encode())
        return await asyncio.wait_for(reader.readline(), 60)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer guess"},
        {"Authorization": key_of("one")},
        {"Authorization": f"Basic {key_of('one')}"},
        {"Authorization": f"Bearer {key_of('one')} "[:-2]},
        {"X-Api-Key": "guess"},
        {"X-Api-Key": ADMIN_KEY},
        {"Authorization": f"Bearer {ADMIN_KEY}"},
        {"X-Admin-Key": ADMIN_KEY},
    ],
)
async def test_a_stranger_gets_a_401_in_its_apis_shape_whatever_it_asks(
    start_fleet: Any, file: Path, headers: dict[str, str]
) -> None:
    async with start_fleet("R1", mode=Mode.REPLICA, keys_file=str(file)) as fleet:
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/v1/audio/speech", "/tokenize"):
            turn = await fleet.post(path, {"model": "sim"}, headers)
            assert turn.status == 401
            error = turn.body["error"]
            assert error["type"] == "authentication_error"
            if path == "/v1/messages":
                assert set(turn.body) == {"type", "error"}
            else:
                assert set(error) == {"message", "type", "param", "code"}
                assert error["code"] == "invalid_api_key"
        async with fleet.session.get(f"{fleet.base_url}/v1/models", headers=headers) as response:
            assert response.status == 401
        assert not fleet.engines["R1"].received
        assert not fleet.proxy.state.receipts.newest(10)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_a_strangers_body_is_not_waited_for(start_fleet: Any, file: Path, path: str) -> None:
    async with start_fleet("R1", keys_file=str(file)) as fleet:
        assert b" 401 " in await head_only(fleet, f"{path} HTTP/1.1")


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {key_of('one')}"},
        {"Authorization": f"bearer  {key_of('one')}"},
        {"X-Api-Key": key_of("one")},
        {"Api-Key": key_of("one")},
    ],
)
async def test_a_key_opens_every_endpoint_and_stays_here(start_fleet: Any, file: Path, headers: dict[str, str]) -> None:
    inner = {"api_key": "inner"}
    async with start_fleet("P1 D1 R1", engine=inner, worker_api_key="inner", keys_file=str(file)) as fleet:
        assert (await fleet.chat(SAY, headers)).status == 200
        body = {"model": "sim", "messages": SAY, "max_tokens": 2}
        assert (await fleet.post("/v1/messages", body, headers)).status == 200
        assert (await fleet.post("/v1/embeddings", {"model": "sim", "input": "x"}, headers)).status == 200
        async with fleet.session.get(f"{fleet.base_url}/v1/models", headers=headers) as response:
            assert response.status == 200
        legs = [one for engine in fleet.engines.values() for one in engine.received]
        assert len(legs) == 4, "P and D of each turn"
        for leg in legs:
            assert leg.headers["Authorization"] == "Bearer inner"
            assert key_of("one") not in str(leg.headers) + leg.body.decode()


async def test_without_a_key_for_workers_they_get_none(start_fleet: Any, file: Path) -> None:
    async with start_fleet("P1 D1", keys_file=str(file)) as fleet:
        assert (await fleet.chat(SAY, bearer("one"))).status == 200
        for engine in fleet.engines.values():
            (leg,) = engine.received
            assert not {"authorization", "x-api-key"} & {name.lower() for name in leg.headers}


async def test_a_client_is_no_operator_and_an_operator_no_client(start_fleet: Any, file: Path) -> None:
    async with start_fleet("R1", keys_file=str(file), open_paths=("/health",)) as fleet:
        for path in ("/admin/workers", "/metrics", "/ready"):
            for headers in ({}, bearer("one"), {"X-Admin-Key": key_of("one")}):
                async with fleet.session.get(fleet.base_url + path, headers=headers) as response:
                    assert response.status == 401, path
            for headers in ({"X-Admin-Key": ADMIN_KEY}, {"Authorization": f"Bearer {ADMIN_KEY}"}):
                async with fleet.session.get(fleet.base_url + path, headers=headers) as response:
                    assert response.status == 200, path
        async with fleet.session.get(f"{fleet.base_url}/health") as response:
            assert response.status == 200
        both = {**bearer("one"), "X-Admin-Key": ADMIN_KEY, "X-PPD-Force-Route": "REPLICA"}
        assert (await fleet.chat(SAY, both)).status == 200
        del both["X-Admin-Key"]
        assert (await fleet.chat(SAY, both)).status == 403


def test_the_admin_key_may_not_be_a_clients(file: Path) -> None:
    with pytest.raises(ConfigError, match="must differ from admin_key"):
        KeyRing(file, key_of("one"))


async def test_a_key_for_some_models_sees_and_reaches_only_those(start_fleet: Any, tmp_path: Path) -> None:
    some, none = client("some", models=("other",)), client("none", models=("elsewhere",))
    keys = write_keys(tmp_path / "keys.toml", client("all"), some, none)

    async def models(fleet: Any, name: str) -> list[str]:
        async with fleet.session.get(f"{fleet.base_url}/v1/models", headers=bearer(name)) as response:
            assert response.status == 200
            return [card["id"] for card in (await response.json())["data"]]

    async with start_fleet("R1", engine={"loras": ("other",)}, mode=Mode.REPLICA, keys_file=keys) as fleet:
        assert [await models(fleet, name) for name in ("all", "some", "none")] == [["sim", "other"], ["other"], []]
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            for model, status in (("other", 200), ("sim", 404), ("unknown", 404)):
                body = {"model": model, "messages": SAY, "input": "x", "max_tokens": 2}
                turn = await fleet.post(path, body, bearer("some"))
                assert turn.status == status, (path, model)
                if status == 404:
                    assert turn.body["error"]["code"] == "model_not_found"
        unnamed = await fleet.post("/v1/embeddings", {"input": "x"}, bearer("some"))
        assert (unnamed.status, unnamed.body["error"]["param"]) == (400, "model")
        assert len(fleet.engines["R1"].received) == 1


@pytest.mark.parametrize(
    ("fields", "content", "status"),
    [
        (["other"], b"audio", 200),
        (["sim"], b"audio", 404),
        (["sim"], b'\r\nContent-Disposition: form-data; name="model"\r\n\r\nother\r\n', 404),
        (["sim"], b'name="model"\r\n\r\nother\r\n', 404),
        (["other", "sim"], b"audio", 400),
        ([], b'Content-Disposition: form-data; name="model"\r\n\r\nother\r\n', 400),
    ],
)
async def test_an_uploads_model_is_its_field_and_nothing_in_its_file(
    start_fleet: Any, tmp_path: Path, fields: list[str], content: bytes, status: int
) -> None:
    keys = write_keys(tmp_path / "keys.toml", client("some", models=("other",)))
    async with start_fleet("R1", engine={"loras": ("other",)}, keys_file=keys) as fleet:
        form = aiohttp.FormData()
        form.add_field("file", content, filename="a.wav", content_type="audio/wav")
        for model in fields:
            form.add_field("model", model)
        url = f"{fleet.base_url}/v1/audio/transcriptions"
        async with fleet.session.post(url, data=form, headers=bearer("some")) as response:
            assert response.status == status, await response.text()


async def test_a_body_read_as_json_is_json_to_the_worker_too(start_fleet: Any, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", client("some", models=("sim",)))
    async with start_fleet("R1", keys_file=keys) as fleet:
        headers = {**bearer("some"), "Content-Type": "a/b+json"}
        data = b'{"model": "sim", "input": "&model=other&"}'
        async with fleet.session.post(f"{fleet.base_url}/v1/embeddings", data=data, headers=headers) as response:
            assert response.status == 200


async def test_a_key_that_is_taken_back_opens_nothing_and_a_broken_file_changes_nothing(
    start_fleet: Any, file: Path
) -> None:
    async with start_fleet("R1", mode=Mode.REPLICA, keys_file=str(file)) as fleet:

        async def statuses() -> list[int]:
            return [(await fleet.chat(SAY, bearer(name))).status for name in ("one", "two", "new")]

        ring = fleet.proxy.files.keys
        assert await statuses() == [200, 200, 401]
        write_keys(file, client("two"), client("new"))
        assert await statuses() == [200, 200, 401]
        assert ring.reload()
        assert await statuses() == [401, 200, 200]
        write(file, "[[key]]\nname = ")
        assert not ring.reload()
        assert await statuses() == [401, 200, 200]
        write(file, encode(client("sly"), hash_of(ADMIN_KEY)))
        assert not ring.reload(), "the admin key is nobody else's"
        write(file, None)
        assert not ring.reload()
        assert await statuses() == [401, 200, 200]


async def test_the_running_proxy_takes_a_changed_file(start_fleet: Any, file: Path) -> None:
    async with start_fleet("R1", mode=Mode.REPLICA, keys_file=str(file)) as fleet:
        write_keys(file, client("new"))
        await fleet.until(lambda: fleet.proxy.files.keys.find(key_of("new")) is not None)
        assert (await fleet.chat(SAY, bearer("one"))).status == 401
        assert await fleet.metric('ppd_config_reloads_total{result="taken"}') == 1


async def test_two_tenants_with_one_prompt_are_two_sessions(start_fleet: Any, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", client("a", tenant="x"), client("b", tenant="x"), client("c"))
    async with start_fleet("P1 D1", keys_file=keys) as fleet:
        messages = [{"role": "user", "content": "the very same opener, long enough for a block or two of it"}]
        first = await fleet.chat(messages, bearer("a"))
        grown = [*messages, {"role": "assistant", "content": first.text}, *SAY]
        theirs = [await fleet.receipt(await fleet.chat(grown, bearer(name))) for name in ("c", "b")]
        assert [(one["client"], one["kind"], one["turn"]) for one in theirs] == [("c", "first", 1), ("b", "next", 2)]
        assert theirs[0]["session"] != theirs[1]["session"]


async def test_requests_a_minute_are_counted_per_key_and_pass_through_is_too(start_fleet: Any, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", client("few", requests_per_minute=3), client("any"))
    async with start_fleet("R1", mode=Mode.REPLICA, keys_file=keys) as fleet:
        assert (await fleet.chat(SAY, bearer("few"))).status == 200
        embed = {"model": "sim", "input": "x"}
        assert (await fleet.post("/v1/embeddings", embed, bearer("few"))).status == 200
        assert (await fleet.chat(SAY, bearer("few"))).status == 200
        for turn in (await fleet.chat(SAY, bearer("few")), await fleet.post("/v1/embeddings", embed, bearer("few"))):
            assert (turn.status, turn.body["error"]["type"]) == (429, "rate_limit_error")
            assert turn.headers["X-PPD-Refused"] == turn.body["error"]["code"] == "requests_per_minute"
            assert 1 <= int(turn.headers["Retry-After"]) <= 20
        assert (await fleet.chat(SAY, bearer("any"))).status == 200
        assert len(fleet.engines["R1"].received) == 3


async def test_tokens_are_settled_by_what_was_really_used(start_fleet: Any, tmp_path: Path) -> None:
    more, less = client("more", tokens_per_minute=600), client("less", tokens_per_minute=300)
    keys = write_keys(tmp_path / "keys.toml", more, less)
    async with start_fleet("R1", mode=Mode.REPLICA, keys_file=keys) as fleet:
        # Estimated at a few tokens more than 256, of which it uses 40: what was too much is given back.
        stop = [*"aeiou ", *"AEIOU"]
        turns = [await fleet.chat(SAY, bearer("less"), max_tokens=2000, stop=stop) for _ in range(5)]
        assert {turn.status for turn in turns} == {200}
        assert sum(turn.body["usage"]["total_tokens"] for turn in turns) < 300, "or it proves nothing"
        # Estimated at 250 tokens, of which it uses 1000: the next has to wait for that.
        long = [{"role": "user", "content": "x" * 1000}]
        assert [(await fleet.chat(long, bearer("more"), max_tokens=1)).status for _ in range(2)] == [200, 429]


async def test_the_tokens_of_pass_through_count(start_fleet: Any, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", *(client(name, tokens_per_minute=60) for name in OURS))
    async with start_fleet("R1", mode=Mode.REPLICA, keys_file=keys) as fleet:
        large = "x" * 3000

        async def ask(name: str, path: str, **body: Any) -> Any:
            return await fleet.post(path, {"model": "sim", **body}, bearer(name))

        assert (await ask("one", "/v1/embeddings", input=large)).body["usage"]["total_tokens"] == 3000
        refused = await ask("one", "/v1/embeddings", input="x")
        assert (refused.status, refused.headers["X-PPD-Refused"]) == (429, "tokens_per_minute")
        assert (await fleet.chat(SAY, bearer("one"))).status == 429
        for _ in range(2):  # no engine computes for this, and what it refuses costs nothing
            assert (await ask("two", "/tokenize", prompt=large)).status == 200
            assert (await ask("two", "/v1/rerank", query=large)).status == 400


async def test_neither_keys_nor_prompts_get_into_logs_receipts_metrics_or_errors(
    start_fleet: Any, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    prompt, wrong = "a-thought-that-is-nobodys-business", "ppd_guessed-key-that-is-wrong"
    receipts = tmp_path / "receipts.jsonl"
    seen: list[str] = []
    async with start_fleet(
        "P1 D1 R1", keys_file=str(file), worker_api_key="inner-key", engine={"api_key": "inner-key"}, log_level="debug",
        receipt_log=str(receipts),
    ) as fleet:  # fmt: skip
        chat = fleet.conversation(**bearer("one"))
        for fault in (
            Faults(),
            Faults(refuse=1, refuse_status=500),
            Faults(refuse=1, refuse_status=400),
            Faults(garbage=1),
            Faults(cut=1),
            Faults(refuse=9, refuse_status=500),
        ):
            for engine in fleet.engines.values():
                engine.faults = msgspec.structs.replace(fault)
            chat.messages.clear()
            turn = await chat.say(f"{prompt} " * 20)
            seen.append(str(turn.headers) + (str(turn.body) if turn.status != 200 else ""))
        for engine in fleet.engines.values():
            engine.faults = Faults()
        bodies: list[Any] = [
            {"model": "sim", "messages": [{"role": prompt, "content": prompt}], "temperature": {prompt: prompt}},
            {"model": "sim", "messages": prompt},
            {"model": "sim", "input": prompt, "encoding_format": {prompt: 1}},
        ]
        for body in bodies:
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/embeddings"):
                for key in ({"X-Api-Key": wrong}, bearer("one")):
                    turn = await fleet.post(path, body, key)
                    seen.append(str(turn.headers) + (str(turn.body) if turn.status in (401, 404, 500, 503) else ""))
        for path in ("/sessions", "/requests", "/workers", "/config"):
            seen.append(str(await fleet.admin("GET", path)))
        async with fleet.session.get(f"{fleet.base_url}/metrics") as response:
            seen.append(await response.text())
        assert fleet.proxy.state.receipts.newest(1)
    seen += [caplog.text, receipts.read_text()]
    assert "decode on" in caplog.text or "prefill on" in caplog.text, "the failures were logged"
    for text in seen:
        for secret in (prompt, wrong, key_of("one"), "inner-key", ADMIN_KEY):
            assert secret not in text


async def test_a_list_of_prompts_counts_as_its_prompts(start_fleet: Any, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", client("few", requests_per_minute=3))
    async with start_fleet("R1", mode=Mode.REPLICA, keys_file=keys) as fleet:
        body = {"model": "sim", "prompt": ["a", "b", "c"], "max_tokens": 2}
        turns = [await fleet.post("/v1/completions", body, bearer("few")) for _ in range(2)]
        assert [turn.status for turn in turns] == [200, 429]
        assert turns[1].headers["X-PPD-Refused"] == "requests_per_minute"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/admin/workers"])
async def test_wrong_keys_cost_time_and_right_ones_from_the_same_address_none(
    start_fleet: Any, tmp_path: Path, path: str
) -> None:
    keys = write_keys(tmp_path / "keys.toml", client("some"))
    async with start_fleet("R1", mode=Mode.REPLICA, keys_file=keys) as fleet:
        body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "input": "x", "max_tokens": 2}
        asking = [asyncio.create_task(fleet.post(path, body, {"Authorization": f"Bearer {n}"})) for n in range(12)]
        answered = 0
        while answered < FREE:
            await asyncio.sleep(0.005)
            answered = sum(task.done() for task in asking)
        turn = await fleet.post("/v1/chat/completions", body, bearer("some"))
        assert turn.status == 200 and not all(task.done() for task in asking)
        done, waiting = await asyncio.wait(asking, timeout=1.0)
        assert {task.result().status for task in done} == {401} and waiting
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await fleet.until(fleet.idle)
