"""For how long a handle is kept, and for whom."""

from __future__ import annotations

from msgspec.structs import replace

from ppd.proxy.fleet.worker import WorkerId
from ppd.proxy.kv_events.block_tokens import packed
from ppd.proxy.readback.handles import ENTRY_BYTES, LEAST_LEFT_S, MODELS_KEPT, REFUSED, REFUSED_S, Handle, Handles
from ppd.proxy.readback.lineage import digest_of

PROMPT = list(range(50))
D1, D2 = WorkerId("d1:80"), WorkerId("d2:80")
HANDLE = Handle(b"{}", 50, digest_of(packed(PROMPT)), "m", D1, "i", until_s=1000.0)


class Time:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_only_a_prompt_that_begins_with_its_tokens_and_goes_on_is_proven() -> None:
    assert HANDLE.proves([*PROMPT, 1])
    for prompt in (PROMPT, PROMPT[:-1], [], [1, *PROMPT[1:], 1], [*PROMPT[:-1], 1, 1], [-1, *PROMPT], [2**40]):
        assert not HANDLE.proves(prompt)


def test_a_handle_is_given_out_once() -> None:
    handles = Handles(Time())
    handles.keep(7, HANDLE)
    assert handles.of(7) == HANDLE
    assert (handles.take(7), handles.take(7), handles.of(7), len(handles)) == (HANDLE, None, None, 0)


def test_a_handle_that_p_would_come_to_late_is_none() -> None:
    time = Time()
    handles = Handles(time)
    handles.keep(7, HANDLE)
    time.now_s = HANDLE.until_s - LEAST_LEFT_S
    assert handles.of(7) is not None
    time.now_s += 0.1
    assert (handles.take(7), len(handles)) == (None, 0)


def test_a_session_has_one_and_leaves_it_when_it_moves() -> None:
    handles, newer = Handles(Time()), replace(HANDLE, tokens=60)
    handles.keep(7, HANDLE)
    handles.keep(7, newer)
    handles.answered(7, D1)
    assert handles.of(7) == newer
    handles.answered(8, D2)
    handles.answered(7, D2)
    assert handles.of(7) is None


def test_a_session_leaves_one_from_whose_tokens_it_has_not_gone_on() -> None:
    """As where the client has sent an earlier message with other words."""
    handles = Handles(Time())
    handles.keep(7, HANDLE)
    for gone_on_from in (None, 50, 51):
        handles.answered(7, D1, gone_on_from)
        assert handles.of(7) == HANDLE
    handles.answered(7, D1, 49)
    assert handles.of(7) is None


def test_none_is_kept_of_a_d_that_has_begun_anew_or_left() -> None:
    handles, others = Handles(Time()), replace(HANDLE, decode=D2)
    handles.keep(6, others)
    for now, is_kept in (({D1: "i"}, True), ({D2: "i"}, True), ({D1: "anew"}, False), ({D1: None}, False)):
        handles.keep(7, HANDLE)
        handles.left(now)
        assert (handles.of(7) is not None) is is_kept
    assert handles.of(6) == others
    handles.left({D1: "i", D2: "anew"})
    assert len(handles) == 0


def test_none_is_kept_for_longer_than_d_keeps_the_kv() -> None:
    time = Time()
    handles = Handles(time)
    handles.keep(7, HANDLE)
    handles.keep(8, replace(HANDLE, until_s=2000.0))
    handles.expire()
    assert len(handles) == 2
    time.now_s = HANDLE.until_s
    handles.expire()
    assert list(handles.kept) == [8]
    time.now_s = 2000.0
    handles.expire()
    assert not handles


def test_so_many_bytes_are_kept_and_the_oldest_go_first() -> None:
    time, size = Time(), ENTRY_BYTES + 100
    handles = Handles(time, most_bytes=3 * size)
    for history in range(5):
        handles.keep(history, replace(HANDLE, params=b" " * 100))
    assert [handles.of(history) is not None for history in range(5)] == [False, False, True, True, True]
    for _ in range(5):
        handles.keep(4, replace(HANDLE, params=b" " * 100))
    assert len(handles) == 3, "one in place of another takes no more"
    handles.keep(9, replace(HANDLE, params=b" " * 10_000))
    assert len(handles) == 0
    handles.keep(1, HANDLE)
    time.now_s = 990.0
    handles.keep(2, replace(HANDLE, until_s=2000.0))
    assert len(handles) == 1, "what is over makes room"


def test_a_model_whose_prompts_do_not_begin_so_is_left_alone_for_a_while() -> None:
    time = Time()
    handles = Handles(time)
    handles.keep(7, HANDLE)
    for _ in range(REFUSED - 1):
        handles.judged("m", is_prefix=False)
    handles.judged("m", is_prefix=True)
    for _ in range(REFUSED):
        assert handles.of(7) is not None
        handles.judged("m", is_prefix=False)
    assert handles.of(7) is None
    time.now_s = REFUSED_S - 1
    assert handles.of(7) is None
    time.now_s = REFUSED_S
    assert handles.of(7) is not None
    handles.judged("m", is_prefix=False)
    assert handles.of(7) is None, "once is enough then"


def test_so_many_models_that_prove_none_are_known() -> None:
    """Workers name them."""
    handles = Handles(Time())
    for number in range(MODELS_KEPT + 10):
        handles.judged(f"model {number}", is_prefix=False)
    assert len(handles._refused) == MODELS_KEPT
    assert f"model {MODELS_KEPT + 9}" in handles._refused
