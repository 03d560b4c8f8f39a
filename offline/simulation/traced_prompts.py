"""The prompts of a trace's conversations as tokens: which of them a prompt has in common with which other.

A trace says so by the ids of blocks. A block that is not full has no id of its own, or one that changes with what
follows; if the next prompt repeats all full blocks, it continues this one, and the answer stands where this prompt
ended, unless the next prompt is too short for it. Where a trace has no ids, prompts grow by what a turn adds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ppd.proxy.errors import ConfigError
from ppd.proxy.sessions.token_estimates import DEFAULT_OUTPUT_TOKENS

from ..traces.turns import CHARACTERS_PER_TOKEN, RecordedPrompt, TracedConversation, TracedTurn, runs_of
from .token_tree import TokenRange, TokenTree, Unit, cut_at, in_common, joined
from .workers.kv_cache import Span

LEAST_SHARERS = 3  # conversations that begin alike have a system prompt or tools in common, and no message


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    """One turn: what engines compute (`spans`), what the proxy hashes (`units`), and the same with the answer."""

    spans: tuple[Span, ...]
    units: tuple[Unit, ...]
    reply: tuple[Span, ...]
    reply_unit: int
    prompt_tokens: int
    output_tokens: int
    known_tokens: int  # that the turn before had, its answer included
    head: int  # of its units, how many are a system prompt
    think_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class TracedPrompts:
    """`arrivals_s`: of each conversation, where the trace has them all; `ids`: of spans and units, from 1 up."""

    conversations: tuple[tuple[TurnPrompt, ...], ...]
    arrivals_s: tuple[float, ...] | None
    ids: int

    @property
    def later_turns(self) -> int:
        return sum(len(turns) - 1 for turns in self.conversations)


def traced_prompts(
    conversations: Sequence[TracedConversation], *, most_tokens: int | None = None, most_pause_s: float | None = None
) -> TracedPrompts:
    """most_tokens: a conversation ends before a prompt that has more, its answer included; most_pause_s: longer pauses
    are cut to it. ConfigError where nothing is left.
    """
    tree, addresses = TokenTree(), _Addresses()
    lives = [life for one in conversations if (life := _within(_Life.of(one, addresses), most_tokens)).turns]
    if not lives:
        raise ConfigError(
            f"trace: no conversation begins with a prompt of at most {most_tokens} tokens, answer included",
            param="trace",
        )
    for life in lives:
        for whole, prompt_tokens in zip(life.wholes, life.prompt_tokens, strict=True):
            tree.add(whole, (prompt_tokens, _tokens(whole)))
    arrivals = [life.arrival_s for life in lives if life.arrival_s is not None]
    limit = float("inf") if most_pause_s is None else most_pause_s
    begins = Counter(span.id for life in lives for span in tree.spans(cut_at(life.wholes[0], life.prompt_tokens[0]))[0])
    heads = frozenset(edge for edge, sharers in begins.items() if sharers >= LEAST_SHARERS)
    made = tuple(_prompts(life, tree, heads, limit) for life in lives)
    return TracedPrompts(made, tuple(arrivals) if len(arrivals) == len(lives) else None, tree.ids)


class _Addresses:
    """Each scope of blocks gets addresses of its own, and so does every piece that no block names."""

    def __init__(self) -> None:
        self._scopes: dict[str, int] = {}
        self._own = 0

    def of(self, recorded: RecordedPrompt) -> list[TokenRange]:
        base = self._scopes.setdefault(recorded.scope, len(self._scopes) + 1) << _SCOPE_BITS
        size = recorded.block_tokens
        ranges: list[TokenRange] = []
        for first, blocks in recorded.runs:
            if blocks:
                ranges = joined(ranges, [TokenRange(base + first * size, blocks * size)])
        ranges = cut_at(ranges, recorded.tokens)
        rest = recorded.tokens - _tokens(ranges)
        return [*ranges, self.own(rest)] if rest else ranges

    def own(self, tokens: int) -> TokenRange:
        self._own += tokens + 1
        return TokenRange(-self._own, tokens)


_SCOPE_BITS = 80  # ids of 64 bits, of either sign, times the tokens of a block


@dataclass(slots=True)
class _Life:
    """A conversation as ranges of tokens: of each turn the prompt with its answer."""

    arrival_s: float | None
    turns: Sequence[TracedTurn]
    wholes: list[list[TokenRange]]
    prompt_tokens: list[int]
    output_tokens: list[int]

    @classmethod
    def of(cls, traced: TracedConversation, addresses: _Addresses) -> _Life:
        outputs = [_output_tokens(turn) for turn in traced.turns]
        prompts: list[list[TokenRange]] = []
        wholes: list[list[TokenRange]] = []
        for turn, output in zip(traced.turns, outputs, strict=True):
            grows = turn.prompt is None and prompts and not turn.restarts
            prompts.append([*wholes[-1], addresses.own(_new_tokens(turn))] if grows else _first(turn, addresses))
            wholes.append([*prompts[-1], addresses.own(output)])
        lengths = [_tokens(prompt) for prompt in prompts]
        for at in range(len(prompts) - 2, -1, -1):  # from the end, as each is cut from the one after it
            if not _goes_on(traced.turns[at], traced.turns[at + 1], prompts[at], prompts[at + 1]):
                continue
            prompts[at] = cut_at(prompts[at + 1], lengths[at])
            with_answer = lengths[at] + outputs[at]
            repeats = with_answer < lengths[at + 1]
            wholes[at] = cut_at(prompts[at + 1], with_answer) if repeats else [*prompts[at], wholes[at][-1]]
        return cls(traced.arrival_s, traced.turns, wholes, lengths, outputs)


def _goes_on(
    turn: TracedTurn, following: TracedTurn, prompt: Sequence[TokenRange], after: Sequence[TokenRange]
) -> bool:
    """Whether a recorded prompt is repeated by the next one."""
    if turn.prompt is None or following.prompt is None or following.restarts:
        return False
    full = turn.prompt.tokens - turn.prompt.tokens % turn.prompt.block_tokens
    return following.prompt.tokens > turn.prompt.tokens and in_common(cut_at(prompt, full), after) == full


def _within(life: _Life, most_tokens: int | None) -> _Life:
    sizes = [prompt + output for prompt, output in zip(life.prompt_tokens, life.output_tokens, strict=True)]
    keep = next((at for at, size in enumerate(sizes) if most_tokens is not None and size > most_tokens), len(sizes))
    return _Life(
        life.arrival_s, life.turns[:keep], life.wholes[:keep], life.prompt_tokens[:keep], life.output_tokens[:keep]
    )


def _prompts(life: _Life, tree: TokenTree, heads: Collection[int], most_pause_s: float) -> tuple[TurnPrompt, ...]:
    known = [0, *(in_common(before, after) for before, after in pairwise(life.wholes))]
    made: list[TurnPrompt] = []
    for at, (turn, whole) in enumerate(zip(life.turns, life.wholes, strict=True)):
        tokens = life.prompt_tokens[at]
        spans, units = tree.spans(cut_at(whole, tokens))
        reached, answered = tree.spans(whole)
        made.append(
            TurnPrompt(
                spans=spans,
                units=units,
                reply=_behind(spans, reached),
                reply_unit=answered[-1].id,
                prompt_tokens=tokens,
                output_tokens=life.output_tokens[at],
                known_tokens=min(tokens, known[at]),
                head=_head(spans, units, heads),
                think_s=min(turn.think_s, most_pause_s),
                gap_s=min(turn.gap_s, most_pause_s),
            )
        )
    return tuple(made)


def _head(spans: Sequence[Span], units: Sequence[Unit], heads: Collection[int]) -> int:
    """Units of the prompt's start in which no prompt ends, and which are `heads`; at least one unit follows them."""
    found = 0
    for span, unit in zip(spans, units, strict=False):
        if span.id not in heads or span.tokens != unit.tokens:
            break
        found += 1
    return min(found, len(units) - 1)


def _behind(spans: tuple[Span, ...], reached: tuple[Span, ...]) -> tuple[Span, ...]:
    """What `reached` has more than `spans`, with which it begins."""
    last = len(spans) - 1
    grown = reached[last].tokens - spans[last].tokens
    return ((Span(spans[last].id, grown),) if grown else ()) + reached[last + 1 :]


def _first(turn: TracedTurn, addresses: _Addresses) -> list[TokenRange]:
    if turn.prompt is not None:
        return addresses.of(turn.prompt)
    tokens, blocks = _new_tokens(turn), turn.blocks
    if blocks is None:
        return [addresses.own(tokens)]
    return addresses.of(RecordedPrompt(tokens, runs_of(blocks.ids), blocks.tokens, blocks.scope))


def _new_tokens(turn: TracedTurn) -> int:
    if turn.new_tokens is not None:
        return turn.new_tokens
    return max(1, sum(len(message.content) for message in turn.messages) // CHARACTERS_PER_TOKEN)


def _output_tokens(turn: TracedTurn) -> int:
    if turn.output_tokens is not None:
        return max(1, turn.output_tokens)
    return max(1, len(turn.reply) // CHARACTERS_PER_TOKEN) if turn.reply else DEFAULT_OUTPUT_TOKENS


def _tokens(ranges: Sequence[TokenRange]) -> int:
    return sum([one.tokens for one in ranges])
