"""The tiny model's files, read back by the rules of their formats; that engines like them is tested on real vLLM."""

from __future__ import annotations

import json
import struct
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppd.servers.vllm.cpu_install import Environment
from ppd.servers.vllm.tiny_model import EMITTED, SPECIAL, ModelShape, byte_symbols, ensure_model, tokenizer, write_model

pytestmark = pytest.mark.slow

SHAPE = ModelShape()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_model(made)
    return made


@pytest.fixture(scope="module")
def weights(folder: Path) -> dict[str, Any]:
    """Rows by name of each tensor; a vector is one row."""
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    rows: dict[str, Any] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        values = array("f", data[start:end])
        columns = entry["shape"][-1]
        rows[name] = [values[i : i + columns] for i in range(0, len(values), columns)]
        assert len(rows[name]) == (entry["shape"][0] if len(entry["shape"]) == 2 else 1)
    return rows


def test_the_weights_have_the_shapes_of_the_config(folder: Path, weights: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    hidden = config["hidden_size"]
    layer = "model.layers.0.self_attn"
    for name, rows, columns in (
        ("model.embed_tokens.weight", config["vocab_size"], hidden),
        ("lm_head.weight", config["vocab_size"], hidden),
        (f"{layer}.q_proj.weight", config["num_attention_heads"] * config["head_dim"], hidden),
        (f"{layer}.k_proj.weight", config["num_key_value_heads"] * config["head_dim"], hidden),
        (f"{layer}.o_proj.weight", hidden, config["num_attention_heads"] * config["head_dim"]),
        ("model.layers.0.mlp.down_proj.weight", hidden, config["intermediate_size"]),
    ):
        assert (len(weights[name]), len(weights[name][0])) == (rows, columns), name
    assert len(weights) == 3 + 9 * config["num_hidden_layers"]


def test_only_printable_ascii_can_be_emitted(weights: dict[str, Any]) -> None:
    allowed = {token for token, row in enumerate(weights["lm_head.weight"]) if row[0] == 0}
    assert allowed == {len(SPECIAL) + byte for byte in EMITTED}
    forbidden = [row for row in weights["lm_head.weight"] if row[0] != 0]
    assert all(row[0] < -100 and not any(row[1:]) for row in forbidden)


def test_the_feature_that_forbids_them_is_positive_and_no_layer_writes_to_it(weights: dict[str, Any]) -> None:
    assert all(row[0] == 1 for row in weights["model.embed_tokens.weight"])
    writers = [name for name in weights if name.endswith(("o_proj.weight", "down_proj.weight"))]
    assert len(writers) == 2 * SHAPE.layers
    assert not any(any(weights[name][0]) for name in writers)
    assert all(any(weights[name][1]) for name in writers)


def test_one_byte_is_one_token() -> None:
    document = tokenizer()
    vocabulary = document["model"]["vocab"]
    assert [vocabulary[byte_symbols()[byte]] for byte in range(256)] == list(range(5, 261))
    assert [vocabulary[text] for text in SPECIAL] == list(range(5))
    assert document["model"]["merges"] == []
    assert len(vocabulary) == 261 <= SHAPE.vocabulary


def test_the_same_files_come_out_every_time(tmp_path: Path) -> None:
    small, made = ModelShape(hidden=32, intermediate=32, layers=1), []
    for name, shape in (("one", small), ("again", small), ("other", replace(small, seed=21))):
        write_model(tmp_path / name, shape)
        made.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    one, again, other = made
    assert one == again
    assert {name for name in one if one[name] != other[name]} == {"model.safetensors"}


def test_the_model_is_made_once_beside_the_environment(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "env" / "bin" / "python", "1")
    made = ensure_model(environment)
    assert made.parent == tmp_path
    (made / "mark").touch()
    assert ensure_model(environment) == made
    assert (made / "mark").exists()
    assert [path.name for path in tmp_path.iterdir()] == [made.name], "nothing unfinished is left"
