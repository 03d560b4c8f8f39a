"""What operators are shown of workers."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.proxy.app.client_routes import create_app
from ppd.proxy.app.openapi import document
from ppd.proxy.assembly import assemble
from ppd.proxy.config import ProxyConfig
from ppd.proxy.fleet.booking import LegBooking
from ppd.proxy.fleet.ledger import LegEstimates, Use
from ppd.proxy.fleet.worker import Announcement, Load, Role, Source, Worker, WorkerId
from ppd.proxy.settings import Settings

P, D = WorkerId("p:1"), WorkerId("d:1")
KEY = "an operator's key"
SPLIT = LegEstimates(
    prompt_tokens=1000, new_tokens=400, output_tokens=100, new_on_prefill_tokens=900, prefill_s=0.5, link_s=0.25
)
IDLE = {
    "inflight": 0,
    "queued_prefill_tokens": 0,
    "decoding_sequences": 0,
    "decoding_context_tokens": 0,
    "prefill_left_s": 0.0,
    "reserved_kv_tokens": 0,
    "link_free_in_s": 0.0,
    "report_age_s": None,
}


class AdminApi:
    """A proxy that knows a P and a D, on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.proxy = assemble(Settings(ProxyConfig(admin_key=KEY, heartbeat_port=0)), now=lambda: self.now_s)
        self.registry = self.proxy.state.registry
        for role, address in ((Role.PREFILL, P), (Role.DECODE, D)):
            self.registry.apply(Announcement(Worker(role=role, address=address, source=Source.AGENT)), self.now_s)

    async def workers(self) -> dict[str, dict[str, Any]]:
        client = create_app(self.proxy).test_client()
        answer = await client.get("/admin/workers", headers={"X-Admin-Key": KEY})
        return {worker["id"]: worker for worker in (await answer.get_json())["workers"]}

    async def work(self) -> dict[str, dict[str, Any]]:
        """By worker, what differs from one that has nothing to do."""
        shown = await self.workers()
        return {id: {name: shown[id][name] for name in IDLE if shown[id][name] != IDLE[name]} for id in sorted(shown)}


@pytest.fixture
def api() -> Any:
    api = AdminApi()
    yield api
    api.proxy.listener.close()


async def test_a_worker_is_shown_as_it_is_documented(api: AdminApi) -> None:
    schema = document()["components"]["schemas"]["Worker"]
    for worker in (await api.workers()).values():
        assert worker.keys() == schema["properties"].keys() == set(schema["required"])


async def test_turns_show_in_what_their_workers_have_to_do_until_they_end(api: AdminApi) -> None:
    assert await api.work() == {D: {}, P: {}}
    booking = LegBooking(api.registry, D, P, SPLIT)
    booking.reserve(api.now_s)
    api.now_s += 0.1
    decoding = {"decoding_sequences": 1, "decoding_context_tokens": 1050, "reserved_kv_tokens": 500}
    assert await api.work() == {
        D: {"inflight": 1, **decoding, "link_free_in_s": 0.15},
        P: {
            "inflight": 1,
            "queued_prefill_tokens": 900,
            "prefill_left_s": 0.4,
            "reserved_kv_tokens": 900,
            "link_free_in_s": 0.65,
        },
    }
    booking.free_prefill(api.now_s)
    booking.computed(api.now_s)
    assert await api.work() == {D: {"inflight": 1, **decoding}, P: {}}
    booking.release(api.now_s)
    assert await api.work() == {D: {}, P: {}}


async def test_all_processes_are_counted_and_the_report_has_its_age(api: AdminApi) -> None:
    api.registry.loaded(D, Load(running=3), api.now_s)
    LegBooking(api.registry, D, None, LegEstimates(prompt_tokens=10, new_tokens=10)).reserve(api.now_s)
    api.registry.used_by(1, D, Use(inflight=2, decoding=2, context_tokens=90, reserved_tokens=40))
    api.now_s += 2.5
    assert (await api.work())[D] == {
        "inflight": 3,
        "queued_prefill_tokens": 10,
        "decoding_sequences": 3,
        "decoding_context_tokens": 100,
        "reserved_kv_tokens": 50,
        "report_age_s": 2.5,
    }
