"""Writes a tiny Llama with random weights, and its tokenizer, for engines that run without a GPU.

`python -m ppd.servers.vllm.tiny_model OUT`; needs no PyTorch, so any Python makes the same files.

* One byte of UTF-8 is one token, except for the five special tokens. A text therefore encodes to the same ids again
  after it was generated, and an engine's own answer hits its prefix cache on the next turn.
* Answers consist of printable ASCII and newlines only, and never end by themselves: ask for a number of tokens. They
  are gibberish, but greedy answers depend on the whole prompt, so lost context shows.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cpu_install import Environment

SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
EMITTED = frozenset(b"\n") | frozenset(range(0x20, 0x7F))  # the bytes that an answer may hold


Weight = tuple[str, tuple[int, ...], "array[float]"]  # name, dimensions, values by row


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Small enough for three engines on two cores."""

    vocabulary: int = 320  # 5 special tokens, 256 bytes, padding
    hidden: int = 128
    intermediate: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head: int = 32
    context: int = 32768
    # Standard deviations of the weights, ten times the usual: attention picks few tokens sharply, and over the layers a
    # small difference grows. With 2 layers one changed character in 3,000 went unnoticed, with 6 it shows in 83% of 24
    # cases (in 92% for 1,000), in 32 greedy tokens; float32 and float64 still agreed on every token.
    spread: float = 0.2
    attention_spread: float = 0.25
    seed: int = 20


def byte_symbols() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte, which the `ByteLevel` pre-tokenizer puts in its place."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in symbols)
    return symbols | {byte: chr(256 + index) for index, byte in enumerate(others)}


def tokenizer() -> dict[str, Any]:
    """`tokenizer.json`: a byte-level BPE without merges; byte b has id 5 + b."""
    vocabulary = {text: index for index, text in enumerate(SPECIAL)}
    symbols = byte_symbols()
    vocabulary |= {symbols[byte]: len(SPECIAL) + byte for byte in range(256)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, text in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}
{%- elif message['content'] %}
    {%- for part in message['content'] %}{% if 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}
{%- endif %}
{%- for call in message['tool_calls'] or [] %}
<call>{{ call['function']['name'] }} {{ call['function']['arguments'] | tojson }}</call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tokenizer_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[0],
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def tensors(shape: ModelShape) -> Iterator[Weight]:
    """All weights.

    Feature 0 is the same for every token and no layer writes to it, so it stays positive up to the output matrix,
    where it pushes the tokens that must not be emitted far below all others.
    """
    rng = random.Random(shape.seed)

    def matrix(rows: int, columns: int, spread: float = shape.spread) -> array[float]:
        return array("f", (rng.gauss(0.0, spread) for _ in range(rows * columns)))

    def without_feature_0(values: array[float], columns: int) -> array[float]:
        values[:columns] = array("f", bytes(4 * columns))
        return values

    embedding = matrix(shape.vocabulary, shape.hidden)
    for token in range(shape.vocabulary):
        embedding[token * shape.hidden] = 1.0
    yield "model.embed_tokens.weight", (shape.vocabulary, shape.hidden), embedding

    ones = array("f", [1.0]) * shape.hidden
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (shape.hidden,), ones
        yield f"{name}.post_attention_layernorm.weight", (shape.hidden,), ones
        for projection, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            weights = matrix(rows, shape.hidden, shape.attention_spread)
            yield f"{name}.self_attn.{projection}.weight", (rows, shape.hidden), weights
        output = without_feature_0(matrix(shape.hidden, queries, shape.attention_spread), queries)
        yield f"{name}.self_attn.o_proj.weight", (shape.hidden, queries), output
        for gate in ("gate_proj", "up_proj"):
            inner = matrix(shape.intermediate, shape.hidden)
            yield f"{name}.mlp.{gate}.weight", (shape.intermediate, shape.hidden), inner
        down = without_feature_0(matrix(shape.hidden, shape.intermediate), shape.intermediate)
        yield f"{name}.mlp.down_proj.weight", (shape.hidden, shape.intermediate), down
    yield "model.norm.weight", (shape.hidden,), ones

    head = matrix(shape.vocabulary, shape.hidden)
    for token in range(shape.vocabulary):
        emitted = token - len(SPECIAL) in EMITTED
        row = token * shape.hidden
        if not emitted:
            head[row : row + shape.hidden] = array("f", bytes(4 * shape.hidden))
        head[row] = 0.0 if emitted else -1000.0
    yield "lm_head.weight", (shape.vocabulary, shape.hidden), head


def safetensors(weights: Iterable[Weight]) -> bytes:
    """One file: length of the header, JSON header, little-endian data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, dimensions, values in weights:
        assert len(values) == math.prod(dimensions)
        if sys.byteorder == "big":
            values.byteswap()
        start = len(data)
        data += values.tobytes()
        header[name] = {"dtype": "F32", "shape": list(dimensions), "data_offsets": [start, len(data)]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded + bytes(data)


def write_model(folder: Path, shape: ModelShape | None = None) -> None:
    shape = shape or ModelShape()
    folder.mkdir(parents=True, exist_ok=True)
    documents = {
        "config.json": config(shape),
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": tokenizer_config(shape),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=1, ensure_ascii=False), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(safetensors(tensors(shape)))


def ensure_model(environment: Environment) -> Path:
    """The model's folder beside the environment, written if it is not there."""
    return ensure_written(environment, "tiny-model", [Path(__file__)], write_model)


def ensure_written(environment: Environment, name: str, sources: Iterable[Path], write: Callable[[Path], None]) -> Path:
    """A folder beside the environment, written if it is not there; its name has a hash of the files that decide."""
    source = hashlib.sha256(b"".join(one.read_bytes() for one in sources)).hexdigest()[:10]
    folder = environment.folder.with_name(f"{name}-{source}")
    if not folder.is_dir():
        environment.folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            unfinished = Path(scratch) / "model"
            write(unfinished)
            try:
                unfinished.rename(folder)
            except OSError:  # another caller has written the same files
                if not folder.is_dir():
                    raise
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: tiny_model.py OUT")
    write_model(Path(sys.argv[1]))
