"""What the session table costs: bytes per idle session, and the time of a lookup.

    python -m benchmarks.small.session_memory --sessions 100000

Every session has an id of its own from the client, a D and a P that hold its prefix, in whose books it has entries, and
`--turns` finished turns: the most that an idle chat session keeps. Prints one JSON line per number of turns. Times are
the processor's, of the turn that comes next, taken after memory is counted, when nothing traces it. `find` is the
session (`SessionTable.find`), `held` what each worker holds of the prompt (its marks, and `Beliefs.held`).
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
from statistics import quantiles

from ppd.proxy.beliefs.beliefs import Beliefs
from ppd.proxy.beliefs.held import PromptEntry, Residency
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Role, Worker, WorkerId
from ppd.proxy.openai.reply_key import ReplyKey
from ppd.proxy.openai.request import Endpoint, ReadingRules, Request, parse_request
from ppd.proxy.sessions.hasher import Hasher
from ppd.proxy.sessions.session import marks_of_prompt
from ppd.proxy.sessions.table import SessionTable, TurnOutcome

Workers = tuple[tuple[WorkerId, str], ...]


def fleet(size: int) -> tuple[Workers, dict[WorkerId, WorkerView]]:
    workers = tuple((WorkerId(f"10.0.{n >> 8}.{n & 255}:8000"), f"incarnation-{n}") for n in range(size))
    return workers, {
        worker: WorkerView(worker=Worker(role=Role.DECODE, address=worker), name=f"D{n}", incarnation=incarnation)
        for n, (worker, incarnation) in enumerate(workers, start=1)
    }


def conversation(number: int, turns: int, hasher: Hasher) -> list[Request]:
    messages: list[dict[str, str]] = [{"role": "system", "content": "You are helpful."}]
    requests = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn} of {number}"})
        body = json.dumps({"model": "m", "messages": messages}).encode()
        headers = {"x-session-id": f"session-{number}"}
        requests.append(parse_request(Endpoint.CHAT, body, headers, ReadingRules(hasher=hasher, tenant="t")))
        messages.append({"role": "assistant", "content": reply_to(turn)})
    return requests


def reply_to(turn: int) -> str:
    return f"answer {turn}"


class Proxy:
    """What remembers sessions in one process of a proxy."""

    def __init__(self, sessions: int, workers: int) -> None:
        self.workers, self.views = fleet(workers)
        self.beliefs = Beliefs(self.views.get)
        self.table = SessionTable(ttl_s=1e9, capacity=sessions, beliefs=self.beliefs)

    def play(self, requests: list[Request], number: int, now_s: float) -> tuple[float, float]:
        """Finishes the requests in order; returns the seconds that it took to find the last one, and who holds it."""
        started_s = found_s = ended_s = 0.0
        for turn, request in enumerate(requests):
            started_s = time.thread_time()
            place = self.table.find(request.prompt, now_s)
            found_s = time.thread_time()
            marks = marks_of_prompt(request.prompt, place.held_tokens + place.new_bytes // 4)
            self.beliefs.held(self.views, PromptEntry(place.history, place.source, marks), place.held_tokens)
            ended_s = time.thread_time()
            reply = ReplyKey(request)
            reply.add_text(reply_to(turn))
            prompt, completion = 1000 * (turn + 1), 300 + turn
            outcome = TurnOutcome(
                prompt_tokens=prompt,
                completion_tokens=completion,
                reply_key=reply.key(),
                decode=self.residency(number, prompt + completion),
                prefill=self.residency(number + 1, prompt),
            )
            self.table.finish(place, request.prompt, outcome, now_s)
        return found_s - started_s, ended_s - found_s

    def residency(self, number: int, tokens: int) -> Residency:
        worker, incarnation = self.workers[number % len(self.workers)]
        return Residency(worker, incarnation, tokens)


def bytes_per_session(sessions: int, turns: int, workers: int) -> tuple[float, list[tuple[float, float]]]:
    """Bytes per idle session in a table of this many, and the seconds that each `find` and `held` in it takes."""
    hasher = Hasher(bytes(32))
    tracemalloc.start()
    try:
        before = _traced_bytes()
        proxy = Proxy(sessions, workers)
        for number in range(sessions):
            proxy.play(conversation(number, turns, hasher), number, float(number))
        after = _traced_bytes()
    finally:
        tracemalloc.stop()
    assert len(proxy.table) == sessions, "every conversation is one session"
    numbers = range(sessions - min(sessions, 2000), sessions)
    last = [conversation(number, turns + 1, hasher)[-1:] for number in numbers]
    gc.freeze()  # so that no collection walks through the table while a turn is timed
    times_s = [proxy.play(requests, number, float(sessions)) for number, requests in zip(numbers, last, strict=True)]
    gc.unfreeze()
    return (after - before) / sessions, times_s


def _traced_bytes() -> int:
    """Bytes in use, without the interpreter's free lists: a full collection empties them."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.small.session_memory", description="Bytes per idle session and time per look-up."
    )
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 3, 10])
    parser.add_argument("--workers", type=int, default=8)
    args = parser.parse_args()
    for turns in args.turns:
        size, times_s = bytes_per_session(args.sessions, turns, args.workers)
        found = {"sessions": args.sessions, "turns": turns, "workers": args.workers, "bytes_per_session": round(size)}
        for name, column in zip(("find", "held"), zip(*times_s, strict=True), strict=True):
            cuts = quantiles(column, n=100)
            found |= {f"{name}_p50_us": round(cuts[49] * 1e6, 1), f"{name}_p99_us": round(cuts[98] * 1e6, 1)}
        print(json.dumps(found))


if __name__ == "__main__":
    main()
