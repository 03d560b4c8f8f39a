"""What every protocol reads of a leg, and what it says of itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from ppd.proxy.fleet.worker import Role

from ..core.errors import BadRequest
from ..core.fault_orders import FaultLeg
from ..core.handoffs import HandedOver, Transfer


class Leg(msgspec.Struct, frozen=True):
    """A generation request as it reached an engine."""

    path: str
    members: Mapping[str, Any]  # of its body
    headers: Mapping[str, str]  # names in any case
    sequences: int  # prompts x choices


class Own(msgspec.Struct, frozen=True):
    """The engine that the leg reached. `host` and `port` are those of its side channel, as peers reach it."""

    role: Role
    engine_id: str
    host: str
    port: int
    reads_back: bool = False  # `bidirectional_kv_xfer`
    keeps_prefixes: bool = False  # an SGLang D with a radix cache
    takes_plain: bool = False  # a P2pNccl D that takes requests without a transfer


class KvProtocol(Protocol):
    """How the legs of a SPLIT find each other. Pure."""

    @property
    def engine(self) -> str:
        """Whose HTTP API the simulated engine has: vllm, sglang or trtllm."""

    @property
    def is_joint(self) -> bool:
        """P computes once D has come, and answers once D has the KV."""

    @property
    def is_written(self) -> bool:
        """P writes into blocks that D has set aside; D keeps them until it has, also of a request that was aborted."""

    @property
    def key_member(self) -> str | None:
        """The member that holds the key by which legs meet; None: they do not."""

    def leg(self, members: Mapping[str, Any], role: Role) -> FaultLeg: ...

    def read(self, leg: Leg, own: Own) -> tuple[Transfer, ...]:
        """One for each sequence; BadRequest names the member that is wrong, missing or not allowed."""

    def answer(self, handed_over: HandedOver, own: Own) -> dict[str, Any] | None:
        """P's `kv_transfer_params`; None if its answer carries none."""

    def coordinates(self, own: Own) -> dict[str, str]:
        """What a proxy must know of P beforehand, as heartbeats name it."""

    def page(self, path: str, query: Mapping[str, str], own: Own) -> tuple[int, Any] | None:
        """The status and JSON of a GET at P's side channel; None: there is no such page."""


_NAMED = re.compile(r"(?:required|unknown) field `(\w+)`")  # msgspec's path ends before it
_Fields = TypeVar("_Fields", bound=msgspec.Struct)


def fields_of(members: Any, kind: type[_Fields], where: str = "") -> _Fields:
    """BadRequest, naming the member, unless `members` has those of `kind` with their types. `where`: their parent."""
    try:
        return msgspec.convert(members, kind)
    except msgspec.ValidationError as exc:
        said, _, at = str(exc).partition(" - at `$")
        found = _NAMED.search(said)
        path = [where, at.rstrip("`"), found[1] if found else ""]
        name = ".".join(part.strip(".") for part in path if part)
        raise BadRequest(f"{name}: {said}", name) from exc


def plain(leg: Leg) -> tuple[Transfer, ...]:
    """Of a request that takes part in no transfer."""
    return (Transfer(),) * leg.sequences


def params_of(leg: Leg) -> dict[str, Any] | None:
    params = leg.members.get("kv_transfer_params")
    if params is not None and not isinstance(params, dict):
        raise BadRequest("kv_transfer_params must be an object.", "kv_transfer_params")
    return params


def leg_of_params(members: Mapping[str, Any]) -> FaultLeg:
    """By vLLM's `kv_transfer_params`; PLAIN if they cannot be read."""
    params = members.get("kv_transfer_params")
    if not isinstance(params, dict):
        return FaultLeg.PLAIN
    if params.get("do_remote_prefill"):
        return FaultLeg.DECODE
    return FaultLeg.PREFILL if params.get("do_remote_decode") else FaultLeg.PLAIN


def request_id(leg: Leg) -> str:
    """As the client names the request to vLLM, whose /v1/responses reads no header; BadRequest without one."""
    name = "request_id" if leg.path == "/v1/responses" else "X-Request-Id"
    value = leg.members.get(name) if name == "request_id" else leg.headers.get(name)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{name}: both legs must have the same one", name)
    return value


def wrong_name(name: str, own: str, given: str) -> BadRequest:
    """Of a name that should have the addresses of both engines. own: this one's."""
    told = f"{own}, this engine's address, and one like it, with ports from 1 to 65535, got {given}"
    return BadRequest(f"{name}: must have {told}", name)


def check_rank(leg: Leg) -> None:
    """BadRequest if a header asks for a data-parallel rank that the engine does not have."""
    name = "X-data-parallel-rank"
    if leg.headers.get(name, "0") != "0":
        raise BadRequest(f"{name}: must be 0, this server's only rank", name)
