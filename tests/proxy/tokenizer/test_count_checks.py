from __future__ import annotations

import logging

import pytest

from ppd.proxy.tokenizer.count_checks import FORMS_LIMIT, PROVEN, CountCheck, CountChecks, form_of

FORM = form_of("m", "/v1/chat/completions", ["messages", "stream"])


@pytest.mark.parametrize(
    ("counts", "is_proven"),
    [
        ("", False),
        ("=" * (PROVEN - 1), False),
        ("=" * PROVEN, True),
        ("!" + "=" * PROVEN, False),
        ("=" * 20 + "!", True),  # once may be chance
        ("=" * 20 + "!!", False),
        ("=" * 20 + "!!" + "=" * PROVEN, True),
        ("!" * 20 + "=" * 11, True),
        ("=!" * 20, False),
    ],
)
def test_tokens_are_used_once_counts_are_right_in_a_row(counts: str, is_proven: bool) -> None:
    results = list[str]()
    checks = CountChecks(results.append)
    for one in counts:
        checks.learn(CountCheck(FORM, 100), 100 if one == "=" else 101)
    assert checks.is_proven(FORM) is is_proven
    assert results == ["right" if one == "=" else "wrong" for one in counts]


def test_each_form_of_requests_is_proven_by_itself() -> None:
    checks = CountChecks()
    for _ in range(PROVEN):
        checks.learn(CountCheck(FORM, 5), 5)
    others = [
        form_of("other", "/v1/chat/completions", []),
        form_of("m", "/v1/messages", []),
        form_of("m", "/v1/chat/completions", ["tools"]),
        form_of("m", "/v1/chat/completions", ["chat_template_kwargs"]),
    ]
    assert [checks.is_proven(form) for form in (FORM, *others)] == [True, False, False, False, False]


def test_forms_are_bounded() -> None:
    checks = CountChecks()
    for number in range(2 * FORMS_LIMIT):
        checks.learn(CountCheck((str(number),), 1), 1)
    assert len(checks._scores) == FORMS_LIMIT


def test_a_tokenizer_that_counts_otherwise_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    checks = CountChecks()
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            checks.learn(CountCheck(FORM, 90), 100)
    (line,) = caplog.messages
    assert line.startswith(
        "model m, /v1/chat/completions: the tokenizer counts 90 tokens in a prompt where the worker counts 100"
    )
