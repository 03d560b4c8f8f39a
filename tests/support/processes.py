"""Two processes of one proxy in one event loop, without a network beyond their wires."""

from __future__ import annotations

import asyncio
from typing import Any

from ppd.proxy.assembly import Proxy, assemble
from ppd.proxy.config import Mode, ProxyConfig
from ppd.proxy.fleet.registry import Registry
from ppd.proxy.fleet.worker import Role, Worker, WorkerId
from ppd.proxy.peers.channels import wires
from ppd.proxy.peers.member import Member
from ppd.proxy.settings import Settings

R1 = WorkerId("r1:1")


def worker(registry: Registry, address: str = R1) -> WorkerId:
    one = Worker(role=Role.REPLICA, address=address, models=("m",))
    registry.add_static(one, 0.0)
    registry.probed(one.id, one, None, 0.0)
    return one.id


def written(registry: Registry, worker_id: WorkerId = R1) -> int:
    view = registry.view(worker_id)
    assert view is not None
    return view.written_tokens


class Pair:
    """Two processes, 0 and 1; tests do what their event loops would."""

    def __init__(self, **settings: Any) -> None:
        self.ends = wires(2)
        self.secret = Member().secret
        self.clock = 1000.0
        self.config = ProxyConfig(mode=Mode.REPLICA, heartbeat_port=0, **settings)
        self.begun = list[Proxy]()
        self.ones = [self.begin(index) for index in range(2)]

    def begin(self, index: int) -> Proxy:
        member = Member(index=index, ends=self.ends[index], secret=self.secret)
        self.begun.append(assemble(Settings(self.config), now=lambda: self.clock, member=member))
        return self.begun[-1]

    async def join(self) -> None:
        await asyncio.gather(*(one.siblings.join() for one in self.ones))

    async def hush(self) -> None:
        for one in self.begun:
            await one.siblings.close()
            probing = list(one.prober._probing.values())
            for task in probing:
                task.cancel()
            await asyncio.gather(*probing, return_exceptions=True)
            await one.prober.close()

    def close(self) -> None:
        for one in self.begun:
            one.listener.close()
        for end in (end for of_one in self.ends for end in of_one.values()):
            end.close()
