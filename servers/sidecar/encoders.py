"""The encoders of a turn, as the picker names them in the request's head, and the items that they are to encode."""

from __future__ import annotations

from collections.abc import Mapping

from ppd.proxy.encoders.choosing import NamedEncoders
from ppd.proxy.errors import RequestError
from ppd.proxy.fleet.view import WorkerView
from ppd.proxy.fleet.worker import Role, Worker
from ppd.proxy.gateway.headers import ENCODER_ITEMS, ENCODERS, item_numbers
from ppd.proxy.media.items import MEDIA_LIMIT

from .allow_list import AllowList, entries_of


class Encoders:
    """Finds the E of each turn."""

    def __init__(self, allow_list: AllowList, *, tls: bool, own: frozenset[str]) -> None:
        """own: the addresses of the sidecar and of its engine, which encodes without being asked."""
        self._allow_list = allow_list
        self._tls = tls
        self._own = own

    def named(self, headers: Mapping[str, str]) -> NamedEncoders | None:
        """None: no E is named. Forbidden if one of them is not allowed; RequestError for what no picker writes."""
        named = entries_of(headers.get(ENCODERS, ""))
        if len(named) > MEDIA_LIMIT:
            raise RequestError(f"{ENCODERS}: must name at most {MEDIA_LIMIT} encoders", param=ENCODERS)
        addresses = [self._allow_list.check(each, ENCODERS) for each in named]
        others = tuple(self._view(address) for address in addresses if address not in self._own)
        return NamedEncoders(others, _numbers(headers)) if others else None

    def _view(self, address: str) -> WorkerView:
        return WorkerView(worker=Worker(role=Role.ENCODE, address=address, tls=self._tls), name="E", incarnation="")


def _numbers(headers: Mapping[str, str]) -> frozenset[int] | None:
    try:
        return item_numbers(headers.get(ENCODER_ITEMS, ""))
    except ValueError as exc:
        raise RequestError(str(exc), param=ENCODER_ITEMS) from None
