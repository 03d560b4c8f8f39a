"""Which kind of text is which, and what a prompt adds of each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ppd.proxy.openai.request import Endpoint
from ppd.proxy.sessions.prefix_chain import Chain
from ppd.proxy.sessions.text_kinds import SAMPLED_UNITS, Amounts, Kind, sample, text_kind
from ppd.proxy.sessions.text_kinds import added as added_to
from tests.support.requests import (
    CHAT,
    COMPLETIONS,
    HASHER,
    MESSAGES,
    RESPONSES,
    assistant,
    call,
    image,
    parse,
    text,
    user,
)

PROSE = "it was a quiet evening and nobody had come to the house by the river for many weeks "
CODE = "def find(self, prompt: Prompt) -> Match:\n    return self._index.get(prompt.key, None)\n"
RECORD = '{"id": 4711, "at": "2026-03-01T08:15:00Z", "ok": true, "n": [1, 2, 30]}'
WRITTEN = RECORD.replace(" ", "")  # as arguments are hashed and counted
CHINESE = "我们需要在周五之前把新的缓存方案部署到生产环境，请先在测试集群上验证。"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("", Kind.UNREAD),
        (None, Kind.MEDIA),
        (PROSE, Kind.MARKS_0),
        ("Il était une fois, à Paris, un prince et une fée", Kind.MARKS_5),
        (CODE, Kind.MARKS_20),
        (RECORD, Kind.MARKS_40),
        ("0123456789ABCDEF" * 8, Kind.MARKS_40),
        ("Мы планируем развернуть новую версию сервера", Kind.TWO_BYTES),
        (CHINESE, Kind.THREE_BYTES),
        ("このエラーは設定ファイルの書き方が間違っているときに表示されます。", Kind.KANA),
        ("서버의 응답 시간이 느려진 원인을 찾기 위해 로그를 분석하고 있습니다.", Kind.HANGUL),
    ],
)
@pytest.mark.parametrize("times", [1, 1000])
def test_the_share_of_marks_and_the_script_tell_kinds_apart(said: str | None, kind: Kind, times: int) -> None:
    of_text = sample(said * times if said else said)
    assert text_kind(of_text) == kind
    assert of_text is None or len(of_text) <= 3 * 512
    if said:
        assert text_kind(sample(memoryview((said * times).encode()))) == kind


def test_a_text_of_lone_surrogates_has_a_kind() -> None:
    assert text_kind(sample("\ud800" * 1000)) in list(Kind)


def added(endpoint: Endpoint, prompt: Any, covered: int | None = None) -> dict[Kind, int]:
    return by_kind(added_to(parse(endpoint, prompt).prompt.chain, covered))


def by_kind(amounts: Amounts) -> dict[Kind, int]:
    return dict(zip(map(Kind, amounts[::2]), amounts[1::2], strict=True))


ONE = {Kind.START: 1, Kind.UNITS: 1}


@pytest.mark.parametrize(
    ("endpoint", "prompt", "expected"),
    [
        (CHAT, [user(PROSE)], {**ONE, Kind.MARKS_0: len(PROSE)}),
        (CHAT, [user([text(PROSE)])], {**ONE, Kind.MARKS_0: len(PROSE)}),
        (CHAT, [user([text("hi"), text(RECORD)])], {**ONE, Kind.MARKS_40: len(RECORD) + 2}),
        (CHAT, [user(CHINESE)], {**ONE, Kind.THREE_BYTES: len(CHINESE.encode())}),
        (
            CHAT,
            [user(PROSE), user(RECORD), user(PROSE)],
            {Kind.START: 1, Kind.UNITS: 3, Kind.MARKS_0: 2 * len(PROSE), Kind.MARKS_40: len(RECORD)},
        ),
        (CHAT, [assistant(None, tool_calls=[call(arguments=RECORD)])], {**ONE, Kind.MARKS_40: 1 + len(WRITTEN)}),
        (
            MESSAGES,
            [user([{"type": "tool_result", "tool_use_id": "t", "content": RECORD}, text("go on")])],
            {**ONE, Kind.MARKS_40: len(RECORD) + 16 + 5},
        ),
        (
            RESPONSES,
            [{"type": "function_call_output", "call_id": "c", "output": CODE}],
            {**ONE, Kind.MARKS_20: len(CODE)},
        ),
        (RESPONSES, PROSE, {**ONE, Kind.MARKS_0: len(PROSE)}),
        (COMPLETIONS, PROSE, {Kind.START: 1, Kind.MARKS_0: len(PROSE)}),
        (COMPLETIONS, [1, 2, 3], {Kind.START: 1, Kind.TOKEN_IDS: 12}),
        (COMPLETIONS, [PROSE, PROSE], {**ONE, Kind.MARKS_0: 2 * len(PROSE) - 16}),
    ],
)
def test_a_prompt_adds_bytes_of_the_kinds_of_its_texts(
    endpoint: Endpoint, prompt: Any, expected: dict[Kind, int]
) -> None:
    assert added(endpoint, prompt) == expected


def test_a_picture_makes_its_message_one_of_media() -> None:
    assert set(added(CHAT, [user([text(PROSE), image("https://example.org/a.png")])])) == {*ONE, Kind.MEDIA}


def test_only_what_follows_the_known_prefix_is_added() -> None:
    messages = [user(RECORD), assistant(PROSE), user(CODE)]
    known = parse(CHAT, messages[:2]).prompt_bytes
    assert added(CHAT, messages, known) == {Kind.UNITS: 1, Kind.MARKS_20: len(CODE)}
    assert added(CHAT, messages, parse(CHAT, messages).prompt_bytes) == {}
    assert added(COMPLETIONS, PROSE + RECORD, len(PROSE)) == {Kind.MARKS_40: len(RECORD)}


def test_what_follows_a_stored_response_is_no_start() -> None:
    chain = parse(RESPONSES, PROSE, previous_response_id="resp_1").prompt.chain
    assert by_kind(added_to(chain, 0)) == {Kind.UNITS: 1, Kind.MARKS_0: len(PROSE)}


def test_of_many_messages_only_the_newest_are_looked_at() -> None:
    messages = [user(RECORD), *[user(PROSE)] * SAMPLED_UNITS]
    assert added(CHAT, messages) == {
        Kind.START: 1,
        Kind.UNITS: SAMPLED_UNITS + 1,
        Kind.UNREAD: len(RECORD),
        Kind.MARKS_0: SAMPLED_UNITS * len(PROSE),
    }


def test_a_chain_made_without_texts_counts_them_as_unread() -> None:
    assert by_kind(added_to(Chain((1, 2, 3), (0, 400, 1000), HASHER), 400)) == {Kind.UNITS: 1, Kind.UNREAD: 584}


def test_nothing_of_the_prompt_outlives_the_asking() -> None:
    request = parse(CHAT, [user(PROSE)]).without_prompt()
    assert request.prompt.chain.texts == ()
    prefilled = parse(MESSAGES, [user("hi"), assistant(PROSE)]).prompt.chain.open_unit
    assert prefilled is not None
    assert prefilled.text == ""
    assert PROSE not in json.dumps(repr(parse(CHAT, [user(PROSE)]).prompt.chain))
