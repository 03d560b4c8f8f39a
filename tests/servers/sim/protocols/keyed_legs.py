"""A proxy's two legs under one key, as the protocols of vLLM want them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

HI = [{"role": "user", "content": "Tell me about the sea and the ships on it, at some length."}]
OTHER = [{"role": "user", "content": "Tell me about the sky and the birds in it, at some length."}]
CHAT = "/v1/chat/completions"
Legs = tuple[dict[str, Any], dict[str, Any]]


def mooncake(p: Any, d: Any, key: str) -> Legs:
    host, port = p.side_address
    to_p = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": key}
    to_d = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": key}
    to_d |= {"remote_bootstrap_addr": f"http://{host}:{port}", "remote_engine_id": p.engine_id}
    return to_p, to_d


def nixl_push(p: Any, d: Any, key: str) -> Legs:
    host, port = p.side_address
    to_p = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}
    to_d = {"do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": p.engine_id, "tp_size": 1}
    to_d |= {"remote_host": host, "remote_port": port, "pp_size": 1, "remote_request_id": key}
    return to_p, to_d


def moriio(p: Any, d: Any, key: str) -> Legs:
    to_p = {"do_remote_decode": True, "transfer_id": key, "remote_dp_size": 1, "remote_tp_size": 1}
    to_d = {"do_remote_prefill": True, "transfer_id": key, "remote_dp_size": 1, "remote_tp_size": 1}
    return to_p, to_d | {"remote_dp_rank": 0}


PARAMS: dict[str, Callable[[Any, Any, str], Legs]] = {
    "mooncake": mooncake,
    "moriio": moriio,
    "moriio_read": moriio,
    "nixl_push": nixl_push,
}


def addressed(p: Any, d: Any) -> str:
    of_p, of_d = (f"host:{host},handshake:{port},notify:{port}" for host, port in (p.side_address, d.side_address))
    return f"___prefill_addr_{of_p}___decode_addr_{of_d}_{'0a' * 16}"


class Proxy:
    """Sends both legs with one key, which is new unless it is given."""

    def __init__(self, lab: Any, connector: str, p: Any, d: Any) -> None:
        self._lab = lab
        self._connector = connector
        self.p, self.d = p, d
        self._keys = itertools.count()

    async def leg(
        self, engine: Any, key: str, messages: Any = HI, *, change: Any = None, name: str = "", **asked: Any
    ) -> Any:
        params = PARAMS[self._connector](self.p, self.d, key)[engine is self.d] | (change or {})
        name = addressed(self.p, self.d) if self._connector.startswith("moriio") else name or key
        limit = {"max_tokens": 1} if engine is self.p else {}
        body = {"messages": messages, "kv_transfer_params": params} | limit | asked
        return await self._lab.post(engine, CHAT, body, headers={"X-Request-Id": name})

    async def split(self, *, key: str = "", to_d: Any = HI, **asked: Any) -> list[Any]:
        """P's answer, then D's."""
        key = key or f"key-{next(self._keys)}"
        return list(await asyncio.gather(self.leg(self.p, key, **asked), self.leg(self.d, key, to_d, **asked)))


async def start(lab: Any, connector: str, **settings: Any) -> Proxy:
    both = {"connector": connector, "meeting_timeout_s": 5.0} | settings
    return Proxy(lab, connector, await lab.start("P", **both), await lab.start("D", **both))
