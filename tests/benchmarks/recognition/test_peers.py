"""A router's requests are held by the worker that it chose until their turns have ended."""

from __future__ import annotations

from aiohttp import ClientSession

from benchmarks.recognition.peers import HeldRequests


def test_a_request_is_held_until_its_turn_has_ended() -> None:
    held = HeldRequests(2)
    url = f"http://127.0.0.1:{held.ports[1]}"  # in place of a router that chooses the second worker

    async def asked() -> int:
        async with ClientSession() as session, session.get(f"{url}/get_server_info") as response:
            return response.status

    try:
        assert held.wait(held.is_healthy(url))
        assert held.wait(asked()) == 200
        worker, end = held.wait(held.sent(url, b"{}"))
        assert worker == 1
        other, end_other = held.wait(held.sent(url, b"{}"))
        assert other == 1
        held.wait(end())
        held.wait(end_other())
    finally:
        held.close()


def test_a_router_that_answers_by_itself_has_refused() -> None:
    held = HeldRequests(1)
    try:
        answer = held.wait(_refused(held))
    finally:
        held.close()
    assert "refused a request: 405" in answer


async def _refused(held: HeldRequests) -> str:
    try:
        await held.sent(f"http://127.0.0.1:{held.ports[0]}/elsewhere", b"{}")
    except RuntimeError as exc:
        return str(exc)
    return ""
