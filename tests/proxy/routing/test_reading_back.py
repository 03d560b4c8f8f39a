"""Which D are asked for a handle, and which turns may use it."""

from __future__ import annotations

from dataclasses import replace as replace_worker
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ppd.proxy.assembly import new_state
from ppd.proxy.config import ProxyConfig
from ppd.proxy.connectors.leg import NoHandoff
from ppd.proxy.errors import LegError
from ppd.proxy.failures import Cause, Leg, Phase
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Announcement, Role, Source
from ppd.proxy.kv_events.block_tokens import PromptTokens, packed
from ppd.proxy.openai.answer import AnswerSummary
from ppd.proxy.openai.request import Endpoint
from ppd.proxy.peers.channels import Member
from ppd.proxy.policy.decision import Readable
from ppd.proxy.readback.handles import MARGIN_S, Handle
from ppd.proxy.readback.lineage import ToldHandle, digest_of
from ppd.proxy.routing.attempt import Attempt
from ppd.proxy.routing.reading_back import Reader, asks_handle, keep, with_readable
from ppd.proxy.routing.state import State
from ppd.proxy.sessions.matching import MatchKind
from ppd.proxy.tokenizer.count_checks import CountCheck, CountedPrompt
from tests.proxy.connectors.test_nixl import FROM_P, HANDLE_PARAMS
from tests.support.attempts import decision, running, view
from tests.support.decisions import NEXT
from tests.support.requests import image, parse, user

HANDOFF = FROM_P
TOKENS = list(range(60))
TOLD = ToldHandle(msgspec.json.encode(HANDLE_PARAMS), 60, digest_of(packed(TOKENS)))


def told(role: Role, version: str = "0.33.0", **coordinates: str) -> WorkerView:
    plain = view(role)
    known = {"bidirectional_kv_xfer": "true", **coordinates}
    worker = replace_worker(plain.worker, coordinates=known, engine_version=version, source=Source.AGENT)
    return replace(plain, worker=worker)


def split(prefill: WorkerView, decode: WorkerView, endpoint: Endpoint = Endpoint.CHAT, **members: Any) -> Attempt:
    made = running(decision(Leg.DECODE, prefill, decode))
    stream = members.pop("stream", True)
    made.request, made.handoff = parse(endpoint, stream=stream, **members), HANDOFF
    return made


P, D, OLD_D = told(Role.PREFILL), told(Role.DECODE), told(Role.DECODE, "0.32.1")


@pytest.mark.parametrize(
    ("attempt", "asks"),
    [
        (split(P, D), True),
        (split(P, D, stream=False), True),
        (split(P, D, Endpoint.COMPLETIONS), True),
        (split(P, OLD_D), False),  # its streams name no handle
        (split(P, OLD_D, stream=False), True),
        (split(P, told(Role.DECODE, "")), False),
        (split(P, told(Role.DECODE, ""), stream=False), True),
        (split(view(Role.PREFILL), D), False),
        (split(P, view(Role.DECODE)), False),
        (split(P, told(Role.REPLICA)), False),  # a P reads back from D alone
        (split(P, D, Endpoint.RESPONSES), False),  # their answers name no tokens
        (split(P, D, Endpoint.MESSAGES), False),
        (split(P, D, return_token_ids=True), False),  # the client would see them no more
        (split(P, D, return_token_ids=False), False),  # or does not want them
        (split(P, D, n=2), False),
        (split(P, D, prompt=[user([image("http://x/y.png")])]), False),
        (split(P, D, Endpoint.COMPLETIONS, prompt_embeds="AAAA"), False),
        (running(decision(Leg.LOCAL, decode=D)), False),
    ],
)
def test_a_handle_is_asked_for_where_a_later_turn_can_use_it(attempt: Attempt, asks: bool) -> None:
    assert asks_handle(attempt) is asks


def test_a_d_that_computed_the_prompt_itself_keeps_nothing() -> None:
    attempt = split(P, D)
    attempt.handoff = None
    assert not asks_handle(attempt)


def state_of(*views: WorkerView) -> State:
    state = new_state(ProxyConfig(), Member(), lambda: 0.0)
    state.handles.uptime = lambda: 100.0
    for one in views:
        state.registry.apply(Announcement(one.worker), 0.0)
    return state


def kept(state: State, attempt: Attempt, handle: ToldHandle | None = TOLD) -> Handle | None:
    attempt.decode_asked_s = 100.0
    keep(state, state.sessions.find(attempt.request.prompt, 0.0), attempt, AnswerSummary(handle=handle))
    return state.handles.of(attempt.history)


def test_a_handle_is_good_for_as_long_as_d_keeps_the_kv_counted_from_when_it_was_asked() -> None:
    state = state_of()
    handle = kept(state, split(P, D))
    assert handle is not None
    assert (handle.decode, handle.tokens, handle.until_s) == (D.id, 60, 100.0 + 480 - MARGIN_S)
    short = kept(state, split(P, told(Role.DECODE, decoder_kv_blocks_ttl="90")))
    assert short is not None
    assert short.until_s == 100.0 + 90 - MARGIN_S
    assert kept(state, split(P, told(Role.DECODE, decoder_kv_blocks_ttl="29"))) is None


def test_an_answer_without_a_handle_leaves_the_one_before_unless_the_session_has_moved() -> None:
    state = state_of()
    assert kept(state, split(P, D)) == kept(state, running(decision(Leg.LOCAL, decode=D)), None)
    assert kept(state, running(decision(Leg.LOCAL, decode=view(Role.DECODE, 2))), None) is None
    wrong = replace(TOLD, params=b'{"do_remote_decode":true}')
    assert kept(state, split(P, D), wrong) is None


REQUEST = parse()


def readable(
    state: State, request: Any = REQUEST, counted: CountedPrompt | None = None, turn: Any = None, **changes: Any
) -> Readable | str:
    found = state.sessions.find(request.prompt, 0.0)
    match = replace(found, **{"kind": MatchKind.NEXT, "source": found.history, "held_tokens": 61, **changes})
    handle = state.handles.kept.popitem()[1]
    state.handles.keep(match.history, handle)
    asked = replace(NEXT, **{"decode": D.id, **(turn or {})})
    found_turn = with_readable(state, asked, match, request, counted)
    return found_turn.readable or found_turn.unreadable


def tokens(*ids: int, is_proven: bool = True) -> CountedPrompt:
    return CountedPrompt(PromptTokens(packed(list(ids))), CountCheck(("m",), len(ids)), is_proven)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Readable(D.id, 60)),
        ({"held_tokens": 60}, Readable(D.id, 60)),
        ({"held_tokens": 59}, "not_a_prefix"),  # the reply's reasoning is left out, say
        ({"kind": MatchKind.BRANCH}, "no_handle"),
        ({"kind": MatchKind.RETRY}, "no_handle"),
        ({"source": 7}, "no_handle"),
        ({"turn": {"decode": view(Role.DECODE, 2).id}}, "no_handle"),  # the session has moved
        ({"request": parse(n=2)}, "not_a_prefix"),
        ({"request": parse(model="adapter")}, "not_a_prefix"),  # of which KV is another one
        ({"counted": tokens(*TOKENS, 1)}, Readable(D.id, 60)),
        ({"counted": tokens(*TOKENS[:-1], 1, 1)}, "not_a_prefix"),
        ({"counted": tokens(*TOKENS)}, "not_a_prefix"),
        ({"counted": tokens(1, is_proven=False)}, Readable(D.id, 60)),
    ],
)
def test_a_turn_reads_back_where_messages_and_tokens_go_on_from_it(
    changes: dict[str, Any], expected: Readable | str
) -> None:
    state = state_of(D)
    known = state.registry.view(D.id)
    assert known is not None
    kept(state, split(P, replace(D, incarnation=known.incarnation)))
    assert readable(state, **changes) == expected


def test_a_d_that_has_begun_anew_or_left_has_nothing_to_read() -> None:
    for state in (state_of(D), state_of()):
        kept(state, split(P, replace(D, incarnation="before")))
        assert readable(state) == "no_handle"
        assert not state.handles.kept


def test_what_p_has_answered_counts_if_it_was_proven_in_time() -> None:
    state = state_of()
    handle = kept(state, split(P, D))
    assert handle is not None
    reader = Reader(state.handles)
    assert reader.judged(handle, HANDOFF) == HANDOFF
    assert reader.judged(handle, NoHandoff("params_missing")) == NoHandoff("params_missing")
    state.handles.uptime = lambda: handle.until_s + 0.1
    assert reader.judged(handle, HANDOFF) == NoHandoff("handle_expired"), "the proxy stood still, or P was slow"


@pytest.mark.parametrize("cause", Cause)
def test_p_is_not_blamed_for_what_a_handle_asks_of_it(cause: Cause) -> None:
    state, exc = state_of(), LegError("", worker="p:1", phase=Phase.HEADERS, cause=cause)
    handle = kept(state, split(P, D))
    if cause in (Cause.REQUEST, Cause.SERVER):
        assert Reader(state.handles).after(exc, handle) == NoHandoff("handle_refused")
    else:
        with pytest.raises(LegError):
            Reader(state.handles).after(exc, handle)
    with pytest.raises(LegError):
        Reader(state.handles).after(exc, None)
