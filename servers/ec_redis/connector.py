"""The adapter to vLLM's encoder cache connectors, which `ec_connector_module_path` names; written against vLLM 0.32.

vLLM makes two objects: one in the scheduler, one in each worker. A producer's transfer runs in its first worker, which
has the embeddings; a consumer's in its scheduler, which must know what is there: what it says to have is already in its
memory and checked, because vLLM ends with an error where a promised embedding is missing. The data go on to the workers
with the step that uses them, by vLLM's own channel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver, collect_ec_item_metadata
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.platforms import current_platform

from .engines import Consumer, Producer
from .reservations import Dtype, Embedding, Input, Offer
from .settings import read_settings
from .transport import Transport, connect
from .vllm_objects import consumer_of, engine_name, model_width, read_offers
from .wire import most_data_bytes

DTYPES: dict[torch.dtype, Dtype] = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass
class Announced:
    """What one request of a producer encodes."""

    leg: str
    items: dict[str, Embedding]
    consumer: str


@dataclass
class ECRedisMetadata(ECConnectorMetadata):  # type: ignore[misc]  # vLLM's, for which there are no types here
    """From the scheduler to the workers, with each step."""

    announced: list[Announced] = field(default_factory=list)
    loads: dict[str, tuple[Embedding, bytes]] = field(default_factory=dict)


class RedisECConnector(ECConnectorBase):  # type: ignore[misc]
    """The name that `ec_connector` says."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        """ValueError: a setting or type that can't be, or vLLM's role `ec_both`."""
        super().__init__(vllm_config=vllm_config, role=role)
        if self.is_producer == self.is_consumer:
            raise ValueError("ec_role must be ec_producer or ec_consumer: an engine that is both would send to itself")
        if vllm_config.model_config.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {list(DTYPES)}, got {vllm_config.model_config.dtype}")
        config = vllm_config.ec_transfer_config
        self._settings = read_settings(config.ec_connector_extra_config)
        self._name = engine_name(vllm_config, self._settings)
        self._model = vllm_config.model_config
        self._step = ECRedisMetadata()
        self._transport: Transport | None = None
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._resolver = PlaceholderMetadataResolver(self._model)
        self._cached = set[str]()  # what vLLM's own encoder cache has
        self._asked = ""  # the request about which vLLM asked last
        is_scheduler = role == ECConnectorRole.SCHEDULER
        capacity_bytes = int(config.ec_buffer_size)
        if self.is_consumer and is_scheduler:
            self._consumer = Consumer(self._name, self._settings, capacity_bytes, self._connected())
            self._consumer.start()
        elif self.is_producer and not is_scheduler and is_first_rank():
            self._producer = Producer(self._name, self._settings, capacity_bytes, self._connected())
            self._producer.start()

    def shutdown(self) -> None:
        for end in (self._consumer, self._producer):
            if end is not None:
                end.couriers.close(self._settings.redis_timeout_s)
        if self._transport is not None:
            self._transport.close()

    # The scheduler, of both.

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """False: the request is put off to the next step."""
        if self._consumer is None:
            return True
        self._asked = request.request_id
        if self._consumer.is_done(request.request_id):
            return True
        return self._consumer.is_ready(request.request_id, self._inputs(request, num_computed_tokens))

    def has_cache_item(self, identifier: str) -> bool:
        return self._consumer is not None and self._consumer.has(identifier, self._asked)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        if self._consumer is None:
            return
        item = request.mm_features[index].identifier
        self._cached.add(item)
        if (taken := self._consumer.take(item)) is not None:
            self._step.loads[item] = taken

    def build_connector_meta(self, scheduler_output: Any) -> ECRedisMetadata:
        self._cached.difference_update(scheduler_output.free_encoder_mm_hashes)
        if not scheduler_output.total_num_scheduled_tokens:
            return ECRedisMetadata()  # no worker looks at it, so what is to be loaded waits for the next step
        step, self._step = self._step, ECRedisMetadata()
        if self.is_producer:
            for new in scheduler_output.scheduled_new_reqs:
                if new.mm_features:
                    items = {one.identifier: self._encoded(one) for one in new.mm_features}
                    step.announced.append(Announced(new.req_id, items, consumer_of(new)))
        return step

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Of a producer: what its answer says in `ec_transfer_params`, by item. Nothing of vLLM's waits for us."""
        if self._consumer is not None:
            self._consumer.finish(request.request_id, [one for one in read_offers(request).values() if one is not None])
        if not self.is_producer or not request.mm_features:
            return False, None
        told: dict[str, dict[str, Any]] = collect_ec_item_metadata(request.mm_features, self._resolver)
        for one in request.mm_features:
            offer = Offer(self._name, request.request_id, one.identifier, self._encoded(one))
            told[one.identifier] |= {"offer": msgspec.to_builtins(offer)}
        return False, told

    # The workers.

    def start_save_caches(self, **kwargs: Any) -> None:
        """Announces what this step encodes; what is cached from earlier steps is not encoded again."""
        if self._producer is None:
            return
        cache: dict[str, torch.Tensor] = kwargs["encoder_cache"]
        for one in self._get_connector_metadata().announced:
            self._producer.announce(one.leg, one.items, one.consumer)
            for item in one.items:
                if item in cache:
                    self.save_caches(cache, item)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        if self._producer is None or not self._producer.expects(mm_hash):
            return
        tensor = encoder_cache[mm_hash].detach()
        if tensor.ndim != 2 or tensor.dtype not in DTYPES:
            why = "an embedding is not sent: it has shape %s and type %s"
            self._producer.contact.warn(why, tuple(tensor.shape), tensor.dtype)
            return
        rows, width = tensor.shape
        data = tensor.to("cpu").contiguous().view(torch.uint8).numpy().tobytes()
        self._producer.encoded(mm_hash, Embedding((rows, width), DTYPES[tensor.dtype]), data)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        for item, (embedding, data) in self._get_connector_metadata().loads.items():
            rows = torch.frombuffer(bytearray(data), dtype=TORCH_DTYPES[embedding.dtype])
            encoder_cache[item] = rows.reshape(embedding.shape).to(current_platform.device_type)

    def _connected(self) -> Transport:
        self._transport = connect(self._settings, self._name, most_data_bytes(self._settings.max_item_bytes))
        return self._transport

    def _inputs(self, request: Any, computed_tokens: int) -> list[Input]:
        offers = read_offers(request)
        inputs = dict[str, Input]()
        for one in request.mm_features:
            item, place = one.identifier, one.mm_position
            lacks = place.offset + place.length > computed_tokens and item not in self._cached
            known = inputs.get(item)
            is_needed = lacks or (known is not None and known.is_needed)
            inputs[item] = Input(item, self._taken(one), is_needed, item in offers, offers.get(item))
        return list(inputs.values())

    def _encoded(self, feature: Any) -> Embedding:
        """What this producer makes of a medium."""
        measured: dict[str, int] = self._vllm_config.ec_transfer_config.mm_encoder_output_widths  # when it was loaded
        width = measured.get(feature.modality) or model_width(self._model)
        return Embedding((feature.mm_position.get_num_embeds(), width), DTYPES[self._model.dtype])

    def _taken(self, feature: Any) -> Embedding:
        """What this consumer's model takes for a medium."""
        width = self._settings.embedding_width or model_width(self._model)
        return Embedding((feature.mm_position.get_num_embeds(), width), DTYPES[self._model.dtype])


def is_first_rank() -> bool:
    """All ranks have the same embeddings, so that one of them sends."""
    return bool(get_tensor_model_parallel_rank() == 0 and get_pp_group().is_first_rank)
