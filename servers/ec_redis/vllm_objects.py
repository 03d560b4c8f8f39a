"""What is read from vLLM's configs and requests. Nothing in a request's body raises: it may be a stranger's."""

from __future__ import annotations

from typing import Any

import msgspec

from .reservations import Name, Offer
from .settings import ECSettings


def engine_name(vllm_config: Any, settings: ECSettings) -> str:
    """The same for scheduler and workers, another for each data-parallel rank."""
    name = settings.name or vllm_config.ec_transfer_config.engine_id
    parallel = vllm_config.parallel_config
    return f"{name}-dp{parallel.data_parallel_rank}" if parallel.data_parallel_size > 1 else name


def model_width(model: Any) -> int:
    """Of what an encoder makes for the language model; of Qwen3-VL's kind with more levels side by side (DeepStack)."""
    vision = getattr(model.hf_config, "vision_config", None)
    levels = getattr(vision, "deepstack_visual_indexes", None) or ()
    return int(model.get_inputs_embeds_size()) * (1 + len(levels))


def consumer_of(new_request: Any) -> str:
    """Whom the request's body names: `"ec_transfer_params": {"consumer": NAME}`."""
    extra = getattr(new_request.sampling_params, "extra_args", None) or {}
    told = extra.get("ec_transfer_params")
    try:
        return msgspec.convert(told["consumer"], Name) if isinstance(told, dict) else ""
    except (msgspec.ValidationError, KeyError):
        return ""


def read_offers(request: Any) -> dict[str, Offer | None]:
    """By item, what the request's body says that producers encode; None: a producer will say more itself."""
    told = request.ec_transfer_params
    if not isinstance(told, dict):  # none, or by way of `vllm_xargs` anything
        return {}
    offers = dict[str, Offer | None]()
    for item in {one.identifier for one in request.mm_features} & told.keys():
        try:
            offer = msgspec.convert(told[item]["offer"], Offer | None)
        except (msgspec.ValidationError, KeyError, TypeError):
            continue  # another connector's, or a stranger's
        if offer is None or offer.item == item:
            offers[item] = offer
    return offers
