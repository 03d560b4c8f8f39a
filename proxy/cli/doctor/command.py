"""`ppd doctor`: gathers the facts, runs the checks and prints the findings."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from random import Random, SystemRandom
from urllib.parse import urlsplit

import aiohttp
import click
from rich.console import Console

from ...config import secrets_in
from ...errors import PPDError
from .checks import examine, exit_code
from .encoding import encode
from .gather import ProxyClient, facts_of_config, facts_of_proxy
from .probe import converse
from .report import as_json, caption, counts_table, lines, verdict, workers_table
from .values import Facts


@click.command("doctor")
@click.option(
    "--config",
    "config_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Check this TOML file.",
)
@click.option("--proxy", "proxy_url", default="", help="Check this running proxy, such as http://127.0.0.1:10001.")
@click.option("--admin-key", envvar="PPD_ADMIN_KEY", default="", help="The proxy's admin key; default: PPD_ADMIN_KEY.")
@click.option("--client-key", envvar="PPD_CLIENT_KEY", default="", help="A client's API key; default: PPD_CLIENT_KEY.")
@click.option("--model", default="", help="For the probe conversation; default: the fleet's first.")
@click.option("--json", "wants_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def command(
    context: click.Context,
    config_path: Path | None,
    proxy_url: str,
    admin_key: str,
    client_key: str,
    model: str,
    wants_json: bool,
) -> None:
    """Check a config (--config), or a running proxy (--proxy) down to a real handoff.

    Exits with 0 if no check failed, 1 if one did, 2 if the command line is wrong.
    """
    if bool(config_path) == bool(proxy_url):
        raise click.UsageError("give either --config or --proxy")
    if config_path and model:
        raise click.UsageError("--model is for --proxy: a config is checked without a conversation")
    url = proxy_origin(proxy_url) if proxy_url else ""
    console = Console()
    try:
        with Console(stderr=True).status("checking"):
            if config_path:
                facts = asyncio.run(check_config(config_path))
            else:
                facts = asyncio.run(
                    check_proxy(url, admin_key=admin_key, client_key=client_key, model=model, random=SystemRandom())
                )
    except PPDError as exc:
        raise click.ClickException(str(exc)) from exc
    findings = examine(facts)
    if wants_json:
        click.echo(as_json(facts, findings))
    else:
        show(console, facts)
    context.exit(exit_code(findings))


def proxy_origin(text: str) -> str:
    """Scheme, host and port of --proxy; UsageError if it has none."""
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        is_usable = url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
        if is_usable and url.path.rstrip("/") in ("", "/v1") and not url.query:
            return f"{url.scheme}://{url.netloc}"
    except ValueError:
        pass
    raise click.UsageError("--proxy must be like http://127.0.0.1:10001")


async def check_config(path: Path) -> Facts:
    async with aiohttp.ClientSession() as session:
        return await facts_of_config(session, path, secrets_in(os.environ))


async def check_proxy(url: str, *, admin_key: str, client_key: str, model: str, random: Random) -> Facts:
    async with aiohttp.ClientSession() as session:
        proxy = ProxyClient(session, url, admin_key=admin_key, client_key=client_key)
        facts = await facts_of_proxy(session, proxy)
        facts = await converse(session, proxy, facts, model=model, random=random)
        return await encode(session, facts, random)


def show(console: Console, facts: Facts) -> None:
    findings = examine(facts)
    console.print(lines(findings, ascii_only=console.options.ascii_only), soft_wrap=True, highlight=False)
    if facts.workers:
        console.print()
        console.print(workers_table(facts), soft_wrap=True, highlight=False)
        console.print(f"\n{caption(facts)}", soft_wrap=True, highlight=False, markup=False)
        console.print(counts_table(facts), soft_wrap=True, highlight=False)
    console.print()
    console.print(verdict(findings), highlight=False)
