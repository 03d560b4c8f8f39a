"""`ppd why`: prints the receipt of one turn, from a running proxy or from a receipt log."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import aiohttp
import click
import msgspec
from rich.console import Console

from ..errors import PPDError
from ..telemetry.receipts import Receipt, open_receipts, receipt_lines
from .doctor.command import proxy_origin
from .doctor.gather import ProxyClient, Said
from .receipt_damage import Damage
from .table_view import printable
from .why_view import told

NEWEST = 1000  # receipts that are asked for where no id is the one given
NAMED = 10  # of several that match

T = TypeVar("T")

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_RECEIPT = msgspec.json.Decoder(Receipt)


class _Newest(msgspec.Struct):
    newest: list[Receipt]


_NEWEST = msgspec.json.Decoder(_Newest)


@click.command("why")
@click.argument("request_id", metavar="ID")
@click.option("--proxy", "proxy_url", default="", help="Ask this running proxy; default: http://127.0.0.1:10001.")
@click.option("--admin-key", envvar="PPD_ADMIN_KEY", default="", help="The proxy's admin key; default: PPD_ADMIN_KEY.")
@click.option(
    "--log",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read this receipt log instead.",
)
@click.option("--json", "wants_json", is_flag=True, help="Print the receipt as it is.")
def command(request_id: str, proxy_url: str, admin_key: str, log: Path | None, wants_json: bool) -> None:
    """Tell why a turn was computed where it was, and how that went.

    ID is the answer's X-Request-Id, or the beginning of it.
    """
    if log is not None and proxy_url:
        raise click.UsageError("give either --proxy or --log")
    if not _ID.fullmatch(request_id):
        raise click.ClickException("no request has such an id: ids are up to 128 letters, digits and . _ : -")
    try:
        if log is not None:
            receipt = in_log(log, request_id)
        else:
            receipt = asyncio.run(of_proxy(proxy_origin(proxy_url or "http://127.0.0.1:10001"), admin_key, request_id))
    except PPDError as exc:
        raise click.ClickException(exc.message) from exc
    if wants_json:
        click.echo(msgspec.json.encode(receipt))
        return
    console = Console(highlight=False, markup=False)
    for part in told(receipt, console.width):
        console.print(part)


# -- a running proxy


async def of_proxy(url: str, admin_key: str, request_id: str) -> Receipt:
    """ClickException where it cannot tell."""
    async with aiohttp.ClientSession() as session:
        proxy = ProxyClient(session, url, admin_key=admin_key, client_key="")
        said = await proxy.operator(f"/admin/requests/{quote(request_id, safe='')}")
        if said.status == 200:
            return _read(said, _RECEIPT)
        if said.status != 404 or _error(said).get("param") != "request_id":
            raise _cannot_tell(proxy, said)
        said = await proxy.operator(f"/admin/requests?limit={NEWEST}")
        if said.status != 200:
            raise _cannot_tell(proxy, said)
        newest: list[Receipt] = _read(said, _NEWEST).newest
    kept = "which keeps the newest ones only, and none of requests that were refused before they were turns"
    return the_one(newest, request_id, f"{proxy.address}, {kept} (the access log has those)")


def _read(said: Said, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(said.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise click.ClickException(f"the answer is not a PPD proxy's of this version: {exc}") from exc


def _error(said: Said) -> dict[str, object]:
    error = said.json().get("error")
    return error if isinstance(error, dict) else {}


def _cannot_tell(proxy: ProxyClient, said: Said) -> click.ClickException:
    if said.status in (401, 403):
        return click.ClickException(
            f"{proxy.address}: the admin key is missing or wrong: give --admin-key or PPD_ADMIN_KEY"
        )
    why = said.error or printable(str(_error(said).get("message") or f"it answered {said.status}"))
    return click.ClickException(f"{proxy.address}: {why}")


# -- a log


def in_log(path: Path, request_id: str) -> Receipt:
    """Of an id that several turns had, the newest."""
    wanted, found, damage = request_id.encode(), dict[str, Receipt](), Damage()
    try:
        with open_receipts(path) as file:
            for number, line in receipt_lines(file):
                if wanted not in line:  # a receipt's id has no characters that JSON escapes
                    continue
                with damage.of_line(number):
                    receipt = _RECEIPT.decode(line)
                    if receipt.id.startswith(request_id):
                        found[receipt.id] = receipt
    except OSError as exc:
        raise click.ClickException(f"{path}: cannot be read: {exc.strerror}") from exc
    damage.tell(path)
    return the_one([*found.values()], request_id, str(path))


# -- both


def the_one(found: list[Receipt], request_id: str, where: str) -> Receipt:
    """ClickException names those that match, where none or several do."""
    matching = [receipt for receipt in found if receipt.id.startswith(request_id)]
    exact = [receipt for receipt in matching if receipt.id == request_id]
    if exact or len(matching) == 1:
        return (exact or matching)[0]
    if not matching:
        raise click.ClickException(f"no receipt of request {request_id!r} in {where}")
    names = ", ".join(printable(receipt.id) for receipt in matching[:NAMED])
    more = f", and {len(matching) - NAMED} more" if len(matching) > NAMED else ""
    raise click.ClickException(f"{len(matching)} requests begin with {request_id!r}: {names}{more}")
