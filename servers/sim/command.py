"""`ppd sim`, also `python -m ppd.servers.sim`: one simulated engine in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import click

from ppd.proxy.cli import NumberRange
from ppd.proxy.errors import ConfigError, PPDError
from ppd.proxy.fleet.worker import Role
from ppd.proxy.laws.profile_file import find
from ppd.proxy.laws.step_time import EngineProfile

from .core.config import CONNECTORS, EventEncoding, LoadFailurePolicy, ReasoningField, SimConfig, TemplateName
from .core.tokens import Tokenizer
from .launch import running_engine

_DEFAULT = SimConfig()
_CHOICES = {
    "load_failure_policy": LoadFailurePolicy,
    "kv_events_encoding": EventEncoding,
    "template": TemplateName,
    "tokenizer": Tokenizer,
    "reasoning_field": ReasoningField,
}


def _costs(ctx: click.Context, _: click.Parameter, name: str | None) -> EngineProfile:
    """The profile's other figures become the defaults of their flags."""
    if name is None:
        return EngineProfile()
    try:
        profile = find(name)
    except PPDError as exc:
        raise click.BadParameter(exc.message) from exc
    ctx.default_map = {
        "block_size": profile.block_size,
        "num_blocks": profile.num_blocks,
        "max_num_seqs": profile.max_num_seqs,
        "max_num_batched_tokens": profile.costs.max_batched_tokens,
        "long_prefill_token_threshold": profile.costs.long_prefill_tokens,
    }
    return profile.costs


@click.command("sim")
@click.option(
    "--profile",
    "costs",
    metavar="NAME|PATH",
    callback=_costs,
    is_eager=True,
    help="How long its work takes and how much KV it holds, from an engine profile (tables/profiles/README.md); flags "
    "go before what it says.  [default: a built-in H100 with Llama-3.1-8B]",
)
@click.option("--role", type=click.Choice([role.value for role in Role]), default="R", help="P, D, R or E.")
@click.option(
    "--connector",
    type=click.Choice(CONNECTORS),
    default=_DEFAULT.connector,
    show_default=True,
    help="For KV transfer; none: it takes part in none.",
)
@click.option("--host", default=_DEFAULT.host, show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free one.")
@click.option("--model", default=_DEFAULT.model, show_default=True, help="Name to serve.")
@click.option("--lora", "loras", multiple=True, help="A further name to serve; repeatable.")
@click.option(
    "--template",
    type=click.Choice([template.value for template in TemplateName]),
    default=_DEFAULT.template.value,
    show_default=True,
    help="The order of a prompt: as Qwen3 writes it (system, then tools), as GLM-4.6 does (tools, then system), both "
    "with reasoning only after the last user's message, or plain.",
)
@click.option(
    "--tokenizer",
    type=click.Choice([tokenizer.value for tokenizer in Tokenizer]),
    default=_DEFAULT.tokenizer.value,
    show_default=True,
    help="A token is a character, or a piece: 4 characters of prose, 3 of JSON, 1.5 of Chinese on average.",
)
@click.option(
    "--reasoning",
    type=NumberRange(0, 1),
    default=_DEFAULT.reasoning,
    show_default=True,
    help="Share of the answers that begin with reasoning where the request does not say (enable_thinking, "
    "reasoning_effort); with 0 the model never reasons.",
)
@click.option(
    "--reasoning-field",
    type=click.Choice([name.value for name in ReasoningField]),
    default=_DEFAULT.reasoning_field.value,
    show_default=True,
    help="Member of a chat's answer that holds the reasoning.",
)
@click.option("--block-size", default=_DEFAULT.block_size, show_default=True, help="Tokens per KV block.")
@click.option("--num-blocks", default=_DEFAULT.num_blocks, show_default=True, help="KV blocks.")
@click.option("--max-model-len", default=_DEFAULT.max_model_len, show_default=True, help="Tokens of context.")
@click.option("--max-num-seqs", default=_DEFAULT.max_num_seqs, show_default=True, help="Requests in the batch.")
@click.option("--max-num-batched-tokens", default=EngineProfile().max_batched_tokens, show_default=True)
@click.option(
    "--long-prefill-token-threshold",
    default=EngineProfile().long_prefill_tokens,
    show_default=True,
    help="What one step computes of a prompt while there are other requests, as on vLLM; 0: as much as it may.",
)
@click.option(
    "--encoder-item-s",
    default=_DEFAULT.encoder_item_s,
    show_default=True,
    help="How long an image, sound or video takes to encode.",
)
@click.option("--encoder-cache-items", default=_DEFAULT.encoder_cache_items, show_default=True, help="Embeddings kept.")
@click.option(
    "--encoder-metadata/--no-encoder-metadata",
    default=_DEFAULT.encoder_metadata,
    show_default=True,
    help="Whether an E tells what may stand for an item in place of its data.",
)
@click.option("--side-channel-host", default="", show_default="--host", help="The name peers are given to pull from.")
@click.option(
    "--side-channel-port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default="a free one",
    help="Where peers pull KV.",
)
@click.option("--kv-events-endpoint", default="", help="ZeroMQ endpoint, such as tcp://*:5557.")
@click.option("--kv-events-topic", default="", help="{address} in it stands for the engine's own host:port.")
@click.option(
    "--kv-events-encoding",
    type=click.Choice([encoding.value for encoding in EventEncoding]),
    default=_DEFAULT.kv_events_encoding.value,
    show_default=True,
    help="As vLLM up to 0.23 writes events, or as 0.30 and later do.",
)
@click.option("--kv-events-replay-endpoint", default="", help="Where missed KV events are asked for.")
@click.option(
    "--kv-events-buffer-steps",
    default=_DEFAULT.kv_events_buffer_steps,
    show_default=True,
    help="Latest batches of KV events that can be replayed.",
)
@click.option("--time-scale", default=1.0, show_default=True, help="1: as slow as its profile; 0: as fast as possible.")
@click.option("--lease-s", default=_DEFAULT.lease_s, show_default=True, help="How long P keeps a finished prefill.")
@click.option(
    "--bidirectional-kv-xfer", is_flag=True, help="D keeps KV after its answers, and P reads it back, as on vLLM."
)
@click.option(
    "--decoder-kv-blocks-ttl",
    default=_DEFAULT.decoder_kv_blocks_ttl,
    show_default=True,
    help="Seconds for which D keeps KV so.",
)
@click.option(
    "--disaggregation-decode-enable-radix-cache",
    "decode_radix_cache",
    is_flag=True,
    help="An SGLang D keeps prompts, and is sent what it lacks.",
)
@click.option("--takes-plain", is_flag=True, help="A P2pNccl D takes requests without a transfer, as if patched to.")
@click.option(
    "--meeting-timeout-s",
    default=_DEFAULT.meeting_timeout_s,
    show_default=True,
    help="How long a leg waits for the other one that has its key.",
)
@click.option(
    "--kv-load-failure-policy",
    "load_failure_policy",
    type=click.Choice([policy.value for policy in LoadFailurePolicy]),
    default=_DEFAULT.load_failure_policy.value,
    show_default=True,
)
@click.option("--engine-id", default="", show_default="random")
@click.option("--ssl-certfile", default="", help="PEM certificate: clients must use TLS, as on vLLM; peers do not.")
@click.option("--ssl-keyfile", default="", help="Its private key, if that is in a file of its own.")
@click.option("--api-key", default="", help="Required of clients under /v1.")
@click.option(
    "--stores-responses",
    is_flag=True,
    envvar="VLLM_ENABLE_RESPONSES_API_STORE",
    show_envvar=True,
    help="Responses can be read again and continued by previous_response_id.",
)
@click.option("--seed", default=0, show_default=True, help="Engines of one model and seed answer alike.")
@click.option("--fatal-text", default="", help="A request that holds it kills the engine; for tests.")
@click.option("--dev-mode", is_flag=True, help="POST /reset_prefix_cache empties the prefix cache, as on vLLM.")
@click.option("--allow-faults", is_flag=True, help="POST /faults makes the engine misbehave; for tests.")
def command(
    role: str,
    costs: EngineProfile,
    max_num_batched_tokens: int,
    long_prefill_token_threshold: int,
    **options: Any,
) -> None:
    """Run a simulated vLLM engine until SIGTERM or SIGINT; requests in flight then end as aborted."""
    chosen: dict[str, Any] = {name: kind(options.pop(name)) for name, kind in _CHOICES.items()}
    try:
        config = SimConfig(
            role=Role(role),
            **chosen,
            profile=replace(
                costs, max_batched_tokens=max_num_batched_tokens, long_prefill_tokens=long_prefill_token_threshold
            ),
            **options,
        )
    except ConfigError as exc:
        raise click.UsageError(exc.message) from exc
    try:
        asyncio.run(_run(config))
    except PPDError as exc:
        raise click.ClickException(exc.message) from exc


async def _run(config: SimConfig) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with running_engine(config, kill=lambda: os.kill(os.getpid(), signal.SIGKILL)) as engine:
        scheme = "https" if config.ssl_certfile else "http"
        click.echo(f"simulated engine {config.role} {config.model} on {scheme}://{engine.address}")
        await stopped.wait()
