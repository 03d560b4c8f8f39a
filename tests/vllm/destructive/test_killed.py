"""Last, as it costs the fleet its engines: D killed in mid-stream and started again, then P killed in mid-prompt."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any

import pytest

from ppd.proxy.config import Mode
from ppd.proxy.fleet.worker import Role

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = 8000  # tokens: P computes them for seconds
ANSWER = 600  # tokens: D generates them for seconds
LINES = (
    "A conversation that starts while all is well, and is long enough to fill a block or two.",
    "And goes on, where most of it is cached.",
    "And on, whoever is left to answer.",
)
PULLED, HIT = "external_kv_transfer", "local_cache_hit"
serial = itertools.count()


@dataclass
class Session:
    """A conversation through one proxy, and what a replica of its own would have said."""

    fleet: Any
    chat: Any
    body: dict[str, Any]

    async def say(self, text: str) -> Any:
        """The next turn, which must be right."""
        turn = await self.chat.say(text, **self.body)
        assert turn.status == 200, turn.body
        assert turn.text == await self.right()
        return turn

    async def right(self) -> str:
        """What the last turn's answer has to be."""
        text: str = await self.fleet.straight(Role.REPLICA, self.chat.messages[:-1], **self.body)
        return text


async def session(fleet: Any, client: Any) -> Session:
    """Two turns long; its D holds it."""
    begun = Session(fleet, client.conversation(), {"cache_salt": f"killed-{next(serial)}"})
    assert (await begun.say(LINES[0])).route == "SPLIT"
    assert (await begun.say(LINES[1])).route == "LOCAL"
    return begun


async def test_a_d_that_dies_in_mid_stream_and_returns_without_its_cache(fleet: Any) -> None:
    async with (
        fleet.beside(mode=Mode.ALWAYS_LOCAL) as probing,
        fleet.beside(mode=Mode.ALWAYS_LOCAL, probe_interval_s=3600.0) as trusting,
    ):
        broken, waiting = await session(fleet, probing), await session(fleet, probing)
        unaware, unaware_later = await session(fleet, trusting), await session(fleet, trusting)
        await stream_until_killed(fleet, probing, broken)
        # What D was asked for is answered by who is left, at the first try.
        assert (await broken.say(LINES[2])).route == "REPLICA"
        assert (await unaware.say(LINES[2])).route == "REPLICA"

        await fleet.start_again(Role.DECODE)
        await probing.until(lambda: probing.states()["D1"] == "up", limit_s=60)
        # A proxy that looked knows that the cache is gone; D pulls all of the prompt.
        assert (await waiting.say(LINES[2])).route == "SPLIT"
        counters = await fleet.counters(Role.DECODE)
        assert counters.get(HIT, 0.0) == 0
        assert counters[PULLED] > 0
        # One that did not look sends the turn where it was, once its breaker lets it; D computes it all, and says so.
        state = trusting.proxy.state
        await trusting.until(lambda: not state.health.breakers.blocked(state.now()), limit_s=60)
        turn = await unaware_later.say(LINES[2])
        assert turn.route == "LOCAL"
        assert turn.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await fleet.counters(Role.DECODE)).get(HIT, 0.0) == 0
        assert probing.is_idle()
        assert trusting.is_idle()


async def stream_until_killed(fleet: Any, client: Any, begun: Session) -> None:
    """The client has a part of the right text, an error, and no [DONE]."""
    messages = [*begun.chat.messages, {"role": "user", "content": LINES[2]}]
    body = begun.body | {"max_tokens": ANSWER}
    seen = client.new_stream()
    streaming = asyncio.create_task(client.stream(messages, seen, **body))
    await client.until(lambda: len(seen.text) > ANSWER / 20)
    await fleet.engines[Role.DECODE].kill()
    await streaming
    right = await fleet.straight(Role.REPLICA, messages, **body)
    assert (seen.status, seen.done) == (200, False)
    assert seen.error is not None
    assert seen.error["message"]
    assert right.startswith(seen.text)
    assert len(seen.text) < len(right)


async def test_conversations_outlive_a_p_that_dies_in_mid_prompt(fleet: Any) -> None:
    await fleet.mode(Mode.ALWAYS_SPLIT)
    await fleet.until(lambda: fleet.states() == {"P1": "up", "D1": "up", "R1": "up"}, limit_s=60)
    chat = fleet.conversation()
    assert (await chat.say("A conversation that starts while all is well.")).route == "SPLIT"
    async with fleet.beside() as beside:
        prompts = [[{"role": "user", "content": (f"{n} of many words. " * LONG)[:LONG]}] for n in range(2)]
        whole, streamed = beside.chat(prompts[0]), beside.stream(prompts[1])
        asking = asyncio.gather(whole, streamed)
        await fleet.eventually(lambda: fleet.computes(Role.PREFILL))
        await fleet.engines[Role.PREFILL].kill()
        answers = await asking
        for answer, messages in zip(answers, prompts, strict=True):
            assert (answer.status, answer.text) == (200, await fleet.straight(Role.REPLICA, messages))
        assert answers[0].reason == "no_prefill_worker"
        assert answers[1].done
        await beside.until(beside.is_idle)
    second = await chat.say("And goes on without its prefill server.")
    assert (second.status, second.route, second.reason) == (200, "LOCAL", "no_prefill_worker")
    fresh = await fleet.conversation().say("A new one is served as well.")
    assert (fresh.status, fresh.reason) == (200, "no_prefill_worker")
    await fleet.mode(Mode.REPLICA)
    alone = fleet.conversation()
    await fleet.mode(Mode.ALWAYS_SPLIT)
    assert (await alone.say("Whatever is left answers.")).status == 200
