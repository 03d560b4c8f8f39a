from __future__ import annotations

import pytest

from ppd.offline.load.answer import DONE, LIMIT, Answer, error_message, short

USAGE = b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}'


def read(*events: bytes) -> Answer:
    """Events one second apart, the first at 1 s."""
    answer = Answer()
    for at_s, data in enumerate(events, 1):
        answer.read(data, float(at_s))
    return answer


def test_times_are_those_of_the_first_and_the_last_token() -> None:
    answer = read(
        b'{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}',
        b'{"choices":[{"delta":{"content":"a"}}]}',
        b'{"choices":[{"delta":{"content":"b"}}]}',
        b'{"choices":[{"delta":{"content":""},"finish_reason":"length"}]}',
        USAGE,
        DONE,
    )
    assert (answer.first_token_s, answer.last_token_s) == (2.0, 4.0)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (9, 4, 3)
    assert answer.text == "ab"
    answer.judge(3)
    assert answer.error == ""


def test_completions_tell_the_ids_of_their_tokens() -> None:
    answer = read(
        b'{"choices":[{"text":"a","token_ids":[5],"prompt_token_ids":[1,2]}]}',
        b'{"choices":[{"text":"","token_ids":[6]}]}',  # half of a character
        USAGE,
        DONE,
    )
    assert answer.token_ids == [5, 6]
    assert (answer.first_token_s, answer.last_token_s) == (1.0, 2.0)


def test_reasoning_is_a_token_and_no_part_of_the_reply() -> None:
    answer = read(b'{"choices":[{"delta":{"reasoning":"hm"}}]}', b'{"choices":[{"delta":{"content":"a"}}]}')
    assert (answer.first_token_s, answer.text) == (1.0, "a")


TOKEN = b'{"choices":[{"text":"a"}]}'


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ((TOKEN, USAGE), "the answer broke off"),
        ((TOKEN, DONE), "the answer came without usage"),
        ((USAGE, DONE), "the answer has no token"),
        ((TOKEN, USAGE, DONE), "the answer has 3 of 4 tokens"),
        ((TOKEN, b'{"error":{"message":"out of blocks","code":500}}', DONE), "out of blocks"),
        ((TOKEN, b'{"error":{}}', DONE), "an error without a message"),
        ((TOKEN, b"{nonsense", USAGE, DONE), "an event cannot be read"),
        ((TOKEN, b'{"deep":' + b"[" * 100_000, USAGE, DONE), "an event cannot be read"),
        ((), "the answer broke off"),
    ],
)
def test_an_answer_that_is_not_whole_says_why(events: tuple[bytes, ...], error: str) -> None:
    answer = read(*events)
    answer.judge(4)
    assert answer.error.startswith(error)


def test_an_answer_of_any_length_is_whole_where_none_was_asked_for() -> None:
    answer = read(TOKEN, USAGE, DONE)
    answer.judge(None)
    assert answer.error == ""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"no such model","type":"x"}}', "no such model"),
        (b'{"error":"Unauthorized"}', "Unauthorized"),
        (b'{"object":"error","message":"too long"}', "too long"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"detail":[{"msg":"field required"}]}', ""),
        (b"<html>Bad Gateway</html>", ""),
        (b'{"deep":' + b"[" * 100_000, ""),
        (b"[1]", ""),
        (b"", ""),
    ],
)
def test_a_servers_error_is_found_in_any_shape(body: bytes, message: str) -> None:
    assert error_message(body) == message


PROMPT = "So bgcdf hjklm npqrs tvwxz and more that nobody else may see"
IDS = "1204, 1377, 1999, 1020, 1533"


@pytest.mark.parametrize(
    ("message", "prompt", "shown"),
    [
        ("out of blocks", PROMPT, "out of blocks"),
        ("two\n  lines", PROMPT, "two lines"),
        ("bad input: 'hjklm npqrs tvwxz and' is odd", PROMPT, "bad input: '[...]"),
        ("bad input: So  bgcdf\nhjklm npqrs", PROMPT, "bad input: [...]"),
        ("bad ids [1377, 1999, 1020, 1533]", IDS, "bad ids [[...]"),
        ("the key sk-1 and the key op-2", PROMPT, "the key [...] and the key [...]"),
        ("a prompt of one word is not found: Hi", "Hi", "a prompt of one word is not found: Hi"),
        ("", PROMPT, ""),
    ],
)
def test_an_error_shows_neither_keys_nor_prompts(message: str, prompt: str, shown: str) -> None:
    assert short(message, secrets=("sk-1", "op-2", ""), prompt=prompt) == shown


def test_an_error_is_short() -> None:
    assert len(short("x" * 5000, secrets=(), prompt="")) == LIMIT
