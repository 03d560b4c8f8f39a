"""Of how many workers a stored response is asked, where nothing is known of it."""

from __future__ import annotations

from typing import Any

import pytest

from ppd.proxy.admission.keys import Client
from ppd.proxy.admission.tenant_scope import TenantScope
from ppd.proxy.assembly import assemble
from ppd.proxy.config import ProxyConfig
from ppd.proxy.errors import NotFound
from ppd.proxy.fleet.worker import Role, Worker, WorkerId
from ppd.proxy.passthrough.stored_responses import StoredResponses
from ppd.proxy.routing.router import MOST_SEARCHED
from ppd.proxy.settings import Settings
from ppd.proxy.upstream.call import Call

WORKERS = 2 * MOST_SEARCHED
OWN, OTHER = (TenantScope(name, name) for name in (b"1" * 32, b"2" * 32))


class NobodyHasIt:
    """Upstream, of which every worker says 404."""

    status = 404

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def ask(self, call: Call, path: str, **_: Any) -> Any:
        self.asked.append(call.worker.address)
        return self

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("scope", "made_for", "asked", "told"),
    [
        (None, None, MOST_SEARCHED, f"not found on {MOST_SEARCHED} workers; no others were asked."),
        (OWN, OWN, WORKERS, "not found."),
        (OWN, OTHER, 0, "not found."),
        (OWN, None, 0, "not found."),
    ],
)
async def test_an_id_that_was_made_for_the_client_is_asked_of_all(
    scope: TenantScope | None, made_for: TenantScope | None, asked: int, told: str
) -> None:
    response_id = "resp_made-up" if made_for is None else made_for.new_response_id()
    config = ProxyConfig(heartbeat_port=0)
    proxy = assemble(Settings(config), now=lambda: 0.0)
    for number in range(WORKERS):
        worker = Worker(role=Role.REPLICA, address=WorkerId(f"r{number}:1"), models=("m",))
        proxy.state.registry.add_static(worker, 0.0)
        proxy.state.registry.probed(worker.id, worker, None, 0.0)
    workers: Any = NobodyHasIt()
    stored = StoredResponses(config, proxy.state, workers)
    client = Client(name="one", tenant="one", scope=scope)
    with pytest.raises(NotFound) as refused:
        await stored.forward("GET", f"/v1/responses/{response_id}", response_id, {}, client)
    assert refused.value.message == f"Response with id {response_id!r} {told}"
    assert len(set(workers.asked)) == len(workers.asked) == asked
    proxy.listener.close()
