"""Writes a tiny LLaVA with random weights: `tiny_model`'s language model, and a vision tower for images of 56 pixels.

`python -m ppd.servers.vllm.tiny_llava OUT`. An image is 16 tokens. As with its language model, answers are gibberish
that depends on the whole prompt, so an image that is lost or another one shows.
"""

from __future__ import annotations

import json
import random
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import tiny_model
from .cpu_install import Environment
from .tiny_model import SPECIAL, ModelShape, Weight, ensure_written

IMAGE = "<image>"
IMAGE_ID = len(SPECIAL) + 256
CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}
{%- else %}
    {%- for part in message['content'] %}
        {%- if part['type'] == 'image' %}<image>{% elif 'text' in part %}{{ part['text'] }}{% endif %}
    {%- endfor %}
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaShape:
    text: ModelShape = field(default_factory=ModelShape)
    hidden: int = 64
    intermediate: int = 128
    layers: int = 2  # of which vLLM loads those before the one whose output counts
    heads: int = 2
    image: int = 56  # pixels a side
    patch: int = 14
    spread: float = 0.2
    seed: int = 21


def config(shape: LlavaShape) -> dict[str, Any]:
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": IMAGE_ID,
        "image_seq_length": (shape.image // shape.patch) ** 2,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "torch_dtype": "float32",
        "text_config": tiny_model.config(shape.text),
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "image_size": shape.image,
            "patch_size": shape.patch,
            "projection_dim": shape.hidden,
        },
    }


def tokenizer() -> dict[str, Any]:
    """`tiny_model`'s, with a token that stands for an image."""
    document = tiny_model.tokenizer()
    document["added_tokens"].append(document["added_tokens"][0] | {"id": IMAGE_ID, "content": IMAGE})
    document["model"]["vocab"][IMAGE] = IMAGE_ID
    return document


def tensors(shape: LlavaShape) -> Iterator[Weight]:
    rng = random.Random(shape.seed)

    def some(*dimensions: int) -> tuple[tuple[int, ...], array[float]]:
        count = 1
        for one in dimensions:
            count *= one
        return dimensions, array("f", (rng.gauss(0.0, shape.spread) for _ in range(count)))

    def same(value: float, size: int) -> tuple[tuple[int, ...], array[float]]:
        return (size,), array("f", [value]) * size

    hidden, patches = shape.hidden, (shape.image // shape.patch) ** 2
    tower = "vision_tower.vision_model"
    yield f"{tower}.embeddings.class_embedding", *some(hidden)
    yield f"{tower}.embeddings.patch_embedding.weight", *some(hidden, 3, shape.patch, shape.patch)
    yield f"{tower}.embeddings.position_embedding.weight", *some(patches + 1, hidden)
    norms = [f"{tower}.pre_layrnorm", f"{tower}.post_layernorm"]
    matrices = dict[str, tuple[int, int]]()
    for layer in range(shape.layers):
        name = f"{tower}.encoder.layers.{layer}"
        norms += [f"{name}.layer_norm1", f"{name}.layer_norm2"]
        matrices |= {f"{name}.self_attn.{one}_proj": (hidden, hidden) for one in ("q", "k", "v", "out")}
        matrices[f"{name}.mlp.fc1"] = (shape.intermediate, hidden)
        matrices[f"{name}.mlp.fc2"] = (hidden, shape.intermediate)
    matrices["multi_modal_projector.linear_1"] = (shape.text.hidden, hidden)
    matrices["multi_modal_projector.linear_2"] = (shape.text.hidden, shape.text.hidden)
    for name in norms:
        yield f"{name}.weight", *same(1.0, hidden)
        yield f"{name}.bias", *same(0.0, hidden)
    for name, (rows, columns) in matrices.items():
        yield f"{name}.weight", *some(rows, columns)
        yield f"{name}.bias", *same(0.0, rows)
    for name, dimensions, values in tiny_model.tensors(shape.text):
        yield f"language_model.{name}", dimensions, values


def write_llava(folder: Path, shape: LlavaShape | None = None) -> None:
    shape = shape or LlavaShape()
    folder.mkdir(parents=True, exist_ok=True)
    picture = {"height": shape.image, "width": shape.image}
    documents: dict[str, dict[str, Any]] = {
        "config.json": config(shape),
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": tiny_model.tokenizer_config(shape.text) | {"chat_template": CHAT_TEMPLATE},
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "size": {"shortest_edge": shape.image},
            "crop_size": picture,
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "image_token": IMAGE,
            "patch_size": shape.patch,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=1, ensure_ascii=False), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(tiny_model.safetensors(tensors(shape)))


def ensure_llava(environment: Environment) -> Path:
    """The model's folder beside the environment, written if it is not there."""
    return ensure_written(environment, "tiny-llava", [Path(__file__), Path(tiny_model.__file__)], write_llava)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: tiny_llava.py OUT")
    write_llava(Path(sys.argv[1]))
