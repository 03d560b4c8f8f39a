from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ppd.offline.load.dialogue import Author, ChatAuthor, TokenAuthor, check_lengths, too_short
from ppd.offline.load.picture import SIDE
from ppd.offline.load.script import Script
from ppd.offline.load.vocabulary import Vocabulary
from ppd.offline.traces.turns import Blocks, Message, TracedTurn
from ppd.proxy.errors import ConfigError
from ppd.proxy.media.items import named

LETTERS = Vocabulary(units=tuple("bcdfgh"), head=5, first_overhead=8, later_overhead=9)
CHAT, TOKENS = ChatAuthor(LETTERS, seed=3), TokenAuthor(tuple(range(100, 200)), seed=3)


def script(*turns: TracedTurn, number: int = 0) -> Script:
    return Script(number=number, turns=turns)


def lengths(*counts: int) -> Script:
    return script(*(TracedTurn(new_tokens=count, output_tokens=4) for count in counts))


def asked(author: Author, played: Script, index: int = 0) -> dict[str, Any]:
    return author.begin(played).ask(index)


def test_token_prompts_grow_by_the_answers_ids_and_the_new_tokens() -> None:
    dialogue = TOKENS.begin(lengths(10, 5))
    first = [*dialogue.ask(0)["prompt"]]
    dialogue.answered("ignored", [7, 8, 9])
    second = dialogue.ask(1)["prompt"]
    assert (len(first), len(second)) == (10, 18)
    assert second[:13] == [*first, 7, 8, 9]


def test_chat_texts_leave_room_for_what_the_template_adds() -> None:
    dialogue = CHAT.begin(lengths(30, 20))
    first = [*dialogue.ask(0)["messages"]]
    assert [len(message["content"]) for message in first] == [len("So") + 30 - 8]
    dialogue.answered("hello", [])
    second = dialogue.ask(1)["messages"]
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[:2] == [*first, {"role": "assistant", "content": "hello"}]
    assert len(second[2]["content"]) == len("So") + 20 - 9


@pytest.mark.parametrize(("author", "member"), [(CHAT, "messages"), (TOKENS, "prompt")])
def test_no_two_conversations_begin_alike(author: Author, member: str) -> None:
    prompts = [str(asked(author, script(*lengths(40).turns, number=number))[member]) for number in range(200)]
    assert len(set(prompts)) == 200


def test_a_shared_block_is_shared_by_prompts_of_either_kind() -> None:
    shared = TracedTurn(new_tokens=40, blocks=Blocks((0,), 25))
    one, other = (asked(TOKENS, script(shared, number=number))["prompt"] for number in (1, 2))
    assert one[:25] == other[:25]
    assert one[25:] != other[25:]
    texts = [asked(CHAT, script(shared, number=number))["messages"][0]["content"] for number in (1, 2)]
    told = len("So") + 25 - LETTERS.head  # the template's head is part of the block
    assert texts[0][:told] == texts[1][:told]
    assert texts[0][told:] != texts[1][told:]


@pytest.mark.parametrize(("author", "member"), [(CHAT, "messages"), (TOKENS, "prompt")])
def test_a_turn_that_restarts_drops_the_history(author: Author, member: str) -> None:
    dialogue = author.begin(script(TracedTurn(new_tokens=40), TracedTurn(new_tokens=20, restarts=True)))
    dialogue.ask(0)
    dialogue.answered("hello", [7])
    alone = dialogue.ask(1)[member]
    assert len(alone) == (1 if author is CHAT else 20)


def test_images_come_with_the_text_of_their_turn_and_are_all_different() -> None:
    with_images = TracedTurn(new_tokens=30, output_tokens=4, images=2)
    messages = [asked(CHAT, script(with_images, number=number))["messages"] for number in (0, 1)]
    urls = {part["image_url"]["url"] for (message,) in messages for part in message["content"][1:]}
    assert [message[0]["content"][0]["type"] for message in messages] == ["text", "text"]
    assert len(urls) == 4
    prompt = msgspec.Raw(msgspec.json.encode(messages[0]))
    assert [item.pixels for item in named(prompt, "messages", "", 9)[1]] == [SIDE * SIDE] * 2


def test_recorded_messages_are_sent_as_they_are_but_for_tools() -> None:
    turn = TracedTurn(messages=(Message("system", "Be brief."), Message("user", "Hi"), Message("tool", "a.txt")))
    assert asked(ChatAuthor(None, 0), script(turn))["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "user", "content": "a.txt"},
    ]


@pytest.mark.parametrize(
    ("author", "counts", "short"),
    [
        (CHAT, (8, 9), []),
        (CHAT, (7, 9), [7]),
        (CHAT, (8, 8), [8]),
        (TOKENS, (1, 1), []),
    ],
)
def test_turns_that_the_template_alone_exceeds_are_found(
    author: Author, counts: tuple[int, ...], short: list[int]
) -> None:
    assert too_short([lengths(*counts)], author) == short
    if short:
        with pytest.raises(ConfigError, match=rf"of {short[0]} new tokens.*takes 8 in a first turn and 9"):
            check_lengths([lengths(*counts)], author)


@pytest.mark.parametrize(
    ("images", "advice"),
    [(0, "ask for as many at least, or use the completions endpoint"), (1, "ask for as many at least")],
)
def test_what_is_advised_for_them_can_be_done(images: int, advice: str) -> None:
    played = script(TracedTurn(new_tokens=8, images=images), TracedTurn(new_tokens=8))
    with pytest.raises(ConfigError, match=f"{advice}$"):
        check_lengths([played], CHAT)


def test_such_a_turn_is_sent_as_short_as_can_be() -> None:
    assert asked(CHAT, lengths(3))["messages"][0]["content"] == "So"
