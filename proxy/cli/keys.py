"""`ppd keys`: make clients' API keys and heartbeats' certificates, and show what a key file says."""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import zmq.auth
from rich.console import Console

from ..admission.key_file import load
from ..admission.keys import Client, decode, encode, hash_of, new_key
from ..errors import ConfigError
from . import CommandGroup
from .table_view import columns

OWNER_ONLY = 0o600


@click.group("keys", cls=CommandGroup)
def command() -> None:
    """Clients' API keys, kept as hashes in the proxy's `keys_file`; certificates of its encrypted heartbeat port."""


@command.command("new")
@click.option("--name", required=True, help="Unique name of the key, shown in receipts and logs.")
@click.option("--tenant", help="Who shares conversations and a fair share; the name if not given.")
@click.option("--priority", type=int, default=0, show_default=True, help="Lower is served earlier.")
@click.option("--weight", type=float, default=1.0, show_default=True, help="Weight of the tenant in fair sharing.")
@click.option("--rpm", "requests_per_minute", type=int, default=0, help="Requests per minute; 0: no limit.")
@click.option("--tpm", "tokens_per_minute", type=int, default=0, help="Tokens per minute; 0: no limit.")
@click.option("--model", "models", multiple=True, help="A model that it may use, repeatable; all if none is given.")
@click.option("--cache-group", default="", help="Keys of one group share cached prompts; the tenant's do if not given.")
@click.option("--slo", help="Targets of its turns, as ttft=0.5,tpot=0.03; those of its class if not given.")
@click.option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Key file to add it to; created if it does not exist.",
)
def new(name: str, tenant: str | None, file: Path | None, **rights: Any) -> None:
    """Make a key.

    Standard output is the key and nothing else; it is shown once and kept nowhere. Its entry for the key file goes
    into --file, or to standard error.
    """
    client = Client(name=name, tenant=name if tenant is None else tenant, **rights)
    key = new_key(secrets.token_urlsafe)
    entry = encode(client, hash_of(key)).encode(errors="surrogateescape")  # the shell's bytes, which `decode` checks
    if file is None:
        decode(entry, "new key")
        click.echo(b"For the keys_file:\n\n" + entry, err=True)
    else:
        append(file, entry)
        click.echo(f"{file}: key {name!r} added; this is the only time that it is shown", err=True)
    click.echo(key)


@command.command("curve")
@click.argument("name")
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Where the two files go; made if it is not there.  [default: here]",
)
def curve(name: str, folder: Path) -> None:
    """Make a pair of certificates for the encrypted heartbeat port.

    NAME.key is public: an agent's goes into the proxy's `curve_clients_dir`, the proxy's to each agent. NAME.key_secret
    stays where it is used, and only its owner can read it.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError("NAME: must be letters, digits, dots, dashes and underscores", param="name")
    public, secret = folder / f"{name}.key", folder / f"{name}.key_secret"
    for file in (public, secret):
        if file.exists():
            raise ConfigError(f"{file}: is there already, and would be lost")
    before = os.umask(0o077)  # ZeroMQ writes the secret file as any other
    try:
        folder.mkdir(parents=True, exist_ok=True)
        zmq.auth.create_certificates(folder, name)
        public.chmod(0o644)
    except OSError as exc:
        for file in (public, secret):  # half of a pair is of no use, and would pass for one that is there
            with suppress(OSError):  # where the folder cannot be made, none is there
                file.unlink()
        raise ConfigError(f"{folder}: cannot be written: {exc.strerror}") from exc
    finally:
        os.umask(before)
    click.echo(f"{public}: the public certificate\n{secret}: the secret one")


@command.command("list")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def list_keys(file: Path) -> None:
    """Show the keys of FILE: their names, tenants and limits."""
    rows = [("name", "tenant", "priority", "weight", "requests/min", "tokens/min", "models")]
    for client in (entry.client for entry in load(file).entries):
        limits = (client.requests_per_minute or "-", client.tokens_per_minute or "-")
        row = (client.name, client.tenant, client.priority, f"{client.weight:g}", *limits)
        rows.append((*map(str, row), ", ".join(client.models) or "all"))  # type: ignore[arg-type]
    Console().print(columns(rows, right=(2, 3, 4, 5)), soft_wrap=True)


NO_KEYS = re.compile(rb"^[ \t]*key[ \t]*=[ \t]*\[[ \t]*\][ \t]*\n?", re.MULTILINE)


def append(file: Path, entry: bytes) -> None:
    """Adds an entry at the end of the file; if that fails, the file stays as it was.

    ConfigError if the new file would not be valid. The `.part` file is also a lock, so that two keys added at once are
    both kept. A new file is its owner's alone; an existing one keeps its owner and mode.
    """
    target = Path(os.path.realpath(file))  # a symbolic link stays one
    if target.is_symlink():
        raise ConfigError(f"{file}: cannot be written: a loop of links")
    if target.exists() and not target.is_file():  # a device may have no end
        raise ConfigError(f"{file}: cannot be written: no file")
    part = target.with_name(f"{target.name}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
    except FileExistsError:
        raise ConfigError(f"{part}: another key is being added; if that run was ended, delete this file") from None
    except OSError as exc:
        raise ConfigError(f"{file}: cannot be written: {exc.strerror}") from exc
    try:
        with os.fdopen(descriptor, "wb") as out:
            before = NO_KEYS.sub(b"", target.read_bytes() if target.exists() else b"")
            gap = b"" if not before else b"\n" if before.endswith(b"\n") else b"\n\n"
            after = before + gap + entry
            decode(after, str(file))
            _keep_owner(target, descriptor)
            out.write(after)
            out.flush()
            os.fsync(descriptor)
        part.replace(target)
    except BaseException as exc:  # `replace` is the last step: after it a file of this name is another run's
        part.unlink(missing_ok=True)
        if isinstance(exc, OSError):
            raise ConfigError(f"{file}: cannot be written: {exc.strerror}") from exc
        raise


def _keep_owner(target: Path, descriptor: int) -> None:
    """Keeps owner and mode of the replaced file: the user who adds a key may not be the proxy's."""
    if not target.exists():
        return
    old, new = target.stat(), os.fstat(descriptor)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, old.st_mode & 0o777)
