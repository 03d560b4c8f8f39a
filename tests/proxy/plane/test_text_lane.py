"""Plain events past Python: the client gets the bytes, and the proxy learns the text, that it does without the lane."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.upstream.call import Answer, Call
from tests.proxy.plane.stream_rig import DONE, END, HEAD, PATIENT, Played, Rig, chunks, dechunked, event, same, settle

FIRST = chunks(event("first"))
LAST = chunks(DONE) + END


@pytest.mark.parametrize("texts", [["a", " b", "", "déjà vu", "日本", "x" * 300], ["", "", "a"]])
async def test_plain_events_take_the_short_way(texts: list[str]) -> None:
    found = await same(FIRST, *(chunks(event(text)) for text in texts), LAST)
    assert found.said == "first" + "".join(texts) and found.events == 1 + len(texts) and found.is_ended
    assert found.long_ways == 2, "the event that the pattern is learnt from, and the end"


async def test_several_events_in_one_read() -> None:
    texts = [f"word {at} " for at in range(40)]
    found = await same(FIRST, *(chunks(*map(event, texts[at : at + 8])) for at in range(0, 40, 8)), LAST)
    assert found.said == "first" + "".join(texts)
    assert found.long_ways <= 3


ODD = {
    "two events in one chunk": chunks(event("a") + event("b")),
    "half an event in a chunk": chunks(event("abc")[:20], event("abc")[20:]),
    "an escape": chunks(event('say "no"')),
    "a raw line end": chunks(event("ab").replace(b"ab", b"a\nb")),
    "a backslash": chunks(event("a\\b")),
    "an escaped line end": chunks(event("a\nb")),
    "another end, as long": chunks(event("ab").replace(b"null", b'"no"')),
    "its two ends, overlapping": chunks(event("").replace(b'""', b'"')),
    "a control character": chunks(event("ab").replace(b"ab", b"a\x01b")),
    "no UTF-8": chunks(event("ab").replace(b"ab", b"\xff\xfe")),
    "a lone surrogate": chunks(event("\ud800")),
    "an overlong form": chunks(event("ab").replace(b"ab", b"\xc0\x80")),
    "another id": chunks(event("a").replace(b'"c"', b'"d"')),
    "usage": chunks(event("a", usage={"prompt_tokens": 3, "completion_tokens": 1})),
    "a comment": chunks(b": still there\n\n"),
    "an extension": b"%x;a=b\r\n%b\r\n" % (len(event("a")), event("a")),
    "an extension between two": chunks(event("a")) + b"%x;a=b\r\n%b\r\n" % (len(event("b")), event("b")),
    "zeros before the size": b"000%x\r\n%b\r\n" % (len(event("a")), event("a")),
    "zeros between two": chunks(event("a")) + b"00%x\r\n%b\r\n" % (len(event("b")), event("b")),
    "capitals in the size": b"%X\r\n%b\r\n" % (len(event("a" * 100)), event("a" * 100)),
    "a long text": chunks(event("a" * 5000)),
    "a plain one and the next one's size": chunks(event("a")) + b"%x\r\n" % len(event("b")),
    "a plain one and the end": chunks(event("a"), DONE),
    "capitals between two": chunks(event("a")) + b"%X\r\n%b\r\n" % (len(event("b" * 60)), event("b" * 60)),
    "an error": chunks(b'data: {"error": {"message": "m", "code": 500}}\n\n'),
}


@pytest.mark.parametrize("name", ODD)
async def test_everything_else_takes_the_long_way(name: str) -> None:
    odd = ODD[name]
    behind = event("b") + b"\r\n" if name.endswith("next one's size") else b""
    found = await same(FIRST, chunks(event("x")), odd, behind, chunks(event("y")), chunks(event("z")), LAST)
    assert found.body.startswith(b": it begins")


@pytest.mark.parametrize("step", [1, 2, 3, 7, 50, 170, 171, 172])
async def test_in_any_pieces(step: int) -> None:
    wire = FIRST + chunks(*map(event, ["a", "é", "日本", "", "b c"]), event('"'), event("d"), event("e")) + LAST
    found = await same(*(wire[at : at + step] for at in range(0, len(wire), step)))
    assert found.said == 'firstaé日本b c"de' and found.is_ended


@pytest.mark.parametrize("framing", [b"Content-Length: %d\r\n\r\n", b"Connection: close\r\n\r\n"])
async def test_an_answer_without_chunks(framing: bytes) -> None:
    body = event("a") + event("b") + DONE
    head = HEAD.replace(b"Transfer-Encoding: chunked\r\n\r\n", framing % len(body) if b"%" in framing else framing)
    for lane in (True, False):
        rig = Rig(lane=lane)
        await rig.says(head)
        rig.splice.start()
        await rig.says(event("a"), event("b"), DONE)
        rig.read()
        assert rig.stream.sink.said == "ab" and rig.stream.is_over
        await rig.end()


async def test_a_worker_that_ends_in_the_middle_is_told_of_with_all_that_was_passed_on() -> None:
    found = await same(FIRST, chunks(event("a")), chunks(event("b")), END)
    assert found.said == "firstab" and found.events == 3 and b"error" in found.body and found.is_ended


async def test_what_lay_in_memory_behind_a_read_is_not_sent() -> None:
    wire = chunks(event("b"))
    found = await same(
        FIRST, chunks(event("a" * 300)), wire[:-2], wire[-2:], chunks(event("a" * 300)), wire[:-1], wire[-1:], LAST
    )
    assert found.said == "first" + 2 * ("a" * 300 + "b") and found.is_ended


async def test_the_last_chunk_in_the_read_of_a_plain_event() -> None:
    found = await same(FIRST, chunks(event("a")), chunks(event("b")) + END)
    assert found.said == "firstab" and found.is_ended


async def test_bytes_that_are_no_chunk_break_the_stream() -> None:
    found = await same(FIRST, chunks(event("a")), b"no size\r\n")
    assert found.said == "firsta" and found.is_ended and found.frees == 0


async def test_long_answers_are_learnt_whole() -> None:
    texts = [f"{at} " * 20 for at in range(300)]
    found = await same(FIRST, *(chunks(event(text)) for text in texts), LAST)
    assert found.said == "first" + "".join(texts) and found.events == 301
    assert 8 < found.long_ways < 30, "those that would have it keep more than 2 KiB of text"


@pytest.mark.slow
async def test_a_client_that_does_not_read_stops_the_worker_and_loses_nothing() -> None:
    rig = Rig(lane=True)
    await rig.begin()
    await rig.says(FIRST)
    piece, said = chunks(event("a" * 900)) * 8, "first"  # several at once: megabytes fit into the sockets
    rig.worker.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    while not rig.client.pauses:
        await rig.says(piece)
        said += "a" * 900 * 8
    assert rig.answer.is_paused
    while rig.answer.is_paused:
        rig.read()
        await settle()
    await rig.says(LAST)
    while not rig.client.is_ended or rig.client.transport.get_write_buffer_size():
        rig.read()
        await settle()
    rig.read()
    assert rig.stream.sink.said == said
    assert dechunked(rig.got).count(b'"content"') == rig.stream.observer.summary.events
    await rig.end()


async def test_what_follows_an_abandoned_stream_reaches_nobody() -> None:
    rig = Rig(lane=True)
    await rig.begin()
    await rig.says(FIRST, chunks(event("a")))
    rig.splice.abandon()
    assert rig.stream.sink.said == "firsta" and rig.stream.is_abandoned
    rig.read()
    got = rig.got
    rig.got = b""
    with contextlib.suppress(OSError):  # its connection was dropped
        await rig.says(chunks(event("b")))
    rig.read()
    assert got and rig.got == b"" and rig.stream.sink.said == "firsta"
    await rig.end()


async def test_the_next_answer_on_the_connection_is_not_the_streams() -> None:
    rig = Rig(lane=True)
    await rig.begin()
    await rig.says(FIRST, chunks(event("a")), LAST)
    assert rig.owner.frees == 1
    call = Call(Worker(role=Role.DECODE, address="127.0.0.1:1"))
    other = Answer(rig.connection, PATIENT, call, lambda _: None)
    rig.connection.send(other, b"POST / HTTP/1.1\r\n\r\n", ())
    rig.read()
    rig.got = b""
    await rig.says(HEAD + chunks(event("b")))
    rig.read()
    assert rig.got == b"" and rig.stream.sink.said == "firsta" and await other.chunk() == event("b")
    await rig.end()


async def test_the_pool_hears_that_its_worker_answers() -> None:
    rig = Rig(lane=True)
    await rig.begin()
    await rig.says(FIRST)
    rig.owner.has_answered = False
    await rig.says(chunks(event("a")))
    assert rig.owner.has_answered and rig.stream.long_ways == 1
    await rig.end()


TEXTS = st.text(max_size=6) | st.sampled_from(["a", "é", '"', "\\", "\n", "日本"])


@given(st.lists(TEXTS, max_size=12), st.data())
@settings(max_examples=40)
def test_any_texts_in_any_chunks_and_reads(texts: list[str], data: st.DataObject) -> None:
    wire = b"".join(map(event, ["first", *texts])) + DONE
    parts = [*map(event, ["first", *texts]), DONE] if data.draw(st.booleans()) else cut(wire, data)
    found = asyncio.run(_same(cut(chunks(*parts) + END, data)))
    assert found.said == "first" + "".join(texts) and found.is_ended


def cut(wire: bytes, data: st.DataObject) -> list[bytes]:
    places = [0, *sorted(data.draw(st.sets(st.integers(1, len(wire) - 1), max_size=8))), len(wire)]
    return [wire[start:end] for start, end in pairwise(places)]


async def _same(pieces: list[bytes]) -> Played:
    return await same(*pieces)
